// A communicator of NCCL. The functions are NCCL's, with errors as exceptions.
//
// A call of a non-blocking communicator may return while NCCL continues it in the background;
// async_error() returns the state. Calls of one communicator, abort() included, must not run
// concurrently: the owner holds a lock.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "nccl/library.h"

namespace pycollective::nccl {

// Options that are kUnset are left to NCCL.
struct Options {
  int blocking = Config::kUnset;
  int cga_cluster_size = Config::kUnset;
  int min_ctas = Config::kUnset;
  int max_ctas = Config::kUnset;
  int split_share = Config::kUnset;
};

class Comm {
 public:
  static std::unique_ptr<Comm> init(std::shared_ptr<Library> library, const UniqueId& id, int size,
                                    int rank, const Options& options);
  // Does not destroy the communicator: NCCL would wait for the peers, and Python may free an object
  // at any time. A communicator that was neither destroyed nor aborted lives until the process
  // ends.
  ~Comm() = default;
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  bool alive() const { return handle_ != nullptr; }

  int size() const;
  int rank() const;
  int device() const;  // the CUDA device

  // Returns the ncclResult_t: 0, 7 for "in progress", or an error.
  int async_error() const;
  void finalize();
  void destroy();
  void abort();

  // Returns nullptr for color -1, which belongs to no new communicator.
  std::unique_ptr<Comm> split(int color, int key, const Options& options);
  std::unique_ptr<Comm> shrink(std::vector<int> excluded, bool abort, const Options& options);

  void* register_buffer(void* buffer, std::size_t size);
  void deregister_buffer(void* registration);
  // Creates a reduction that multiplies by the factor (of the element type) before it adds.
  int make_pre_mul_sum(const void* factor, int type);
  void destroy_op(int op);

  void all_reduce(const void* send, void* recv, std::size_t count, int type, int op, Stream s);
  void reduce(const void* send, void* recv, std::size_t count, int type, int op, int root,
              Stream s);
  void broadcast(const void* send, void* recv, std::size_t count, int type, int root, Stream s);
  void all_gather(const void* send, void* recv, std::size_t count, int type, Stream s);
  void reduce_scatter(const void* send, void* recv, std::size_t count, int type, int op, Stream s);
  void all_to_all(const void* send, void* recv, std::size_t count, int type, Stream s);
  void gather(const void* send, void* recv, std::size_t count, int type, int root, Stream s);
  void scatter(const void* send, void* recv, std::size_t count, int type, int root, Stream s);
  void send(const void* data, std::size_t count, int type, int peer, Stream s);
  void recv(void* data, std::size_t count, int type, int peer, Stream s);

 private:
  explicit Comm(std::shared_ptr<Library> library) : library_(std::move(library)) {}
  Handle checked_handle() const;  // throws if destroyed or aborted

  std::shared_ptr<Library> library_;
  Handle handle_ = nullptr;  // NCCL may write to its address later, so the object does not move
};

}  // namespace pycollective::nccl

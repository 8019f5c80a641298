// A communicator of NCCL: its calls as they are, with errors as exceptions.
//
// A call that the library goes on with in the background (a communicator that does not block)
// returns at once; async_error() then says whether it still does. Calls of one communicator,
// abort() included, must not be made at the same time: its owner has a lock.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "nccl/library.h"

namespace pycollective::nccl {

// Configured where it is not kUnset.
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
  // Nothing is ended here: NCCL waits for the peers when a communicator is destroyed, and an object
  // may be dropped at any time. One that was neither destroyed nor aborted lives as long as the
  // process.
  ~Comm() = default;
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  const Library& library() const { return *library_; }
  bool alive() const { return handle_ != nullptr; }

  int size() const;
  int rank() const;
  int device() const;  // the CUDA device

  // ncclResult_t: 0, 7 for "in progress", or what has gone wrong.
  int async_error() const;
  void finalize();
  void destroy();
  void abort();

  // nullptr for the color -1, which is in no part.
  std::unique_ptr<Comm> split(int color, int key, const Options& options);
  std::unique_ptr<Comm> shrink(std::vector<int> excluded, bool abort, const Options& options);

  void* register_buffer(void* buffer, std::size_t size);
  void deregister_buffer(void* registration);
  // A reduction that multiplies by the factor, of the element type, before it adds.
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
  Handle living() const;  // throws where it is destroyed or aborted

  std::shared_ptr<Library> library_;
  Handle handle_ = nullptr;  // NCCL may write it later, so its address does not change
};

}  // namespace pycollective::nccl

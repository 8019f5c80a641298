#include "nccl/communicator.h"

#include <algorithm>
#include <utility>

namespace pycollective::nccl {
namespace {

constexpr int kShrinkAfterError = 1;  // aborts running calls

Config config_of(const Library& library, const Options& options) {
  Config config;
  config.version =
      static_cast<unsigned>(std::min(library.version(), static_cast<int>(config.version)));
  config.blocking = options.blocking;
  config.cga_cluster_size = options.cga_cluster_size;
  config.min_ctas = options.min_ctas;
  config.max_ctas = options.max_ctas;
  config.split_share = options.split_share;
  return config;
}

}  // namespace

#define PYCOLLECTIVE_CALL(name, ...) \
  PYCOLLECTIVE_NCCL_CALL(*library_, handle_, name __VA_OPT__(, ) __VA_ARGS__)

std::unique_ptr<Comm> Comm::init(std::shared_ptr<Library> library, const UniqueId& id, int size,
                                 int rank, const Options& options) {
  std::unique_ptr<Comm> made(new Comm(std::move(library)));
  Config config = config_of(*made->library_, options);
  PYCOLLECTIVE_NCCL_CALL(*made->library_, nullptr, CommInitRankConfig, &made->handle_, size, id,
                         rank, &config);
  return made;
}

Handle Comm::checked_handle() const {
  if (!handle_) throw Error("the NCCL communicator was destroyed or aborted", 0);
  return handle_;
}

int Comm::size() const {
  int found = 0;
  PYCOLLECTIVE_CALL(CommCount, checked_handle(), &found);
  return found;
}

int Comm::rank() const {
  int found = 0;
  PYCOLLECTIVE_CALL(CommUserRank, checked_handle(), &found);
  return found;
}

int Comm::device() const {
  int found = 0;
  PYCOLLECTIVE_CALL(CommCuDevice, checked_handle(), &found);
  return found;
}

int Comm::async_error() const {
  Result found = Result::success;
  PYCOLLECTIVE_CALL(CommGetAsyncError, checked_handle(), &found);
  return static_cast<int>(found);
}

void Comm::finalize() { PYCOLLECTIVE_CALL(CommFinalize, checked_handle()); }

void Comm::destroy() {
  checked_handle();
  PYCOLLECTIVE_NCCL_CALL(*library_, nullptr, CommDestroy, std::exchange(handle_, nullptr));
}

void Comm::abort() {
  checked_handle();
  PYCOLLECTIVE_NCCL_CALL(*library_, nullptr, CommAbort, std::exchange(handle_, nullptr));
}

std::unique_ptr<Comm> Comm::split(int color, int key, const Options& options) {
  std::unique_ptr<Comm> part(new Comm(library_));
  Config config = config_of(*library_, options);
  PYCOLLECTIVE_CALL(CommSplit, checked_handle(), color, key, &part->handle_, &config);
  return color < 0 ? nullptr : std::move(part);
}

std::unique_ptr<Comm> Comm::shrink(std::vector<int> excluded, bool abort, const Options& options) {
  std::unique_ptr<Comm> rest(new Comm(library_));
  Config config = config_of(*library_, options);
  PYCOLLECTIVE_CALL(CommShrink, checked_handle(), excluded.data(),
                    static_cast<int>(excluded.size()), &rest->handle_, &config,
                    abort ? kShrinkAfterError : 0);
  return rest;
}

void* Comm::register_buffer(void* buffer, std::size_t size) {
  void* registration = nullptr;
  PYCOLLECTIVE_CALL(CommRegister, checked_handle(), buffer, size, &registration);
  return registration;
}

void Comm::deregister_buffer(void* registration) {
  PYCOLLECTIVE_CALL(CommDeregister, checked_handle(), registration);
}

int Comm::make_pre_mul_sum(const void* factor, int type) {
  int made = 0;
  PYCOLLECTIVE_CALL(RedOpCreatePreMulSum, &made, factor, type, kScalarHostImmediate,
                    checked_handle());
  return made;
}

void Comm::destroy_op(int op) { PYCOLLECTIVE_CALL(RedOpDestroy, op, checked_handle()); }

void Comm::all_reduce(const void* send, void* recv, std::size_t count, int type, int op, Stream s) {
  PYCOLLECTIVE_CALL(AllReduce, send, recv, count, type, op, checked_handle(), s);
}

void Comm::reduce(const void* send, void* recv, std::size_t count, int type, int op, int root,
                  Stream s) {
  PYCOLLECTIVE_CALL(Reduce, send, recv, count, type, op, root, checked_handle(), s);
}

void Comm::broadcast(const void* send, void* recv, std::size_t count, int type, int root,
                     Stream s) {
  PYCOLLECTIVE_CALL(Broadcast, send, recv, count, type, root, checked_handle(), s);
}

void Comm::all_gather(const void* send, void* recv, std::size_t count, int type, Stream s) {
  PYCOLLECTIVE_CALL(AllGather, send, recv, count, type, checked_handle(), s);
}

void Comm::reduce_scatter(const void* send, void* recv, std::size_t count, int type, int op,
                          Stream s) {
  PYCOLLECTIVE_CALL(ReduceScatter, send, recv, count, type, op, checked_handle(), s);
}

void Comm::all_to_all(const void* send, void* recv, std::size_t count, int type, Stream s) {
  PYCOLLECTIVE_CALL(AlltoAll, send, recv, count, type, checked_handle(), s);
}

void Comm::gather(const void* send, void* recv, std::size_t count, int type, int root, Stream s) {
  PYCOLLECTIVE_CALL(Gather, send, recv, count, type, root, checked_handle(), s);
}

void Comm::scatter(const void* send, void* recv, std::size_t count, int type, int root, Stream s) {
  PYCOLLECTIVE_CALL(Scatter, send, recv, count, type, root, checked_handle(), s);
}

void Comm::send(const void* data, std::size_t count, int type, int peer, Stream s) {
  PYCOLLECTIVE_CALL(Send, data, count, type, peer, checked_handle(), s);
}

void Comm::recv(void* data, std::size_t count, int type, int peer, Stream s) {
  PYCOLLECTIVE_CALL(Recv, data, count, type, peer, checked_handle(), s);
}

}  // namespace pycollective::nccl

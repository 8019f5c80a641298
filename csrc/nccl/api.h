// The part of NCCL's interface that this project uses, declared from NCCL's documentation. The
// build needs neither NCCL's header nor its library.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

namespace pycollective::nccl {

using Handle = struct OpaqueCommunicator*;
using Stream = struct OpaqueStream*;

enum class Result : int { success = 0, in_progress = 7 };  // all other values are errors

struct UniqueId {
  char bytes[128];
};

// The fields up to NCCL 2.18, in order. The library reads `size` bytes, and uses defaults for the
// fields of later versions.
struct Config {
  static constexpr int kUnset = INT_MIN;
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = kUnset;
  int cga_cluster_size = kUnset;
  int min_ctas = kUnset;
  int max_ctas = kUnset;
  const char* net_name = nullptr;
  int split_share = kUnset;
};

// ncclRedOpCreatePreMulSum reads the factor from host memory during the call.
constexpr int kScalarHostImmediate = 1;

// F(name, first version, parameters) for each function that returns a Result.
#define PYCOLLECTIVE_NCCL_FUNCTIONS(F)                                                             \
  F(GetVersion, 20000, (int* version))                                                             \
  F(GetUniqueId, 20000, (UniqueId * id))                                                           \
  F(CommInitRankConfig, 21400, (Handle * out, int size, UniqueId id, int rank, Config*))           \
  F(CommFinalize, 21400, (Handle))                                                                 \
  F(CommDestroy, 20000, (Handle))                                                                  \
  F(CommAbort, 20400, (Handle))                                                                    \
  F(CommGetAsyncError, 20400, (Handle, Result * error))                                            \
  F(CommCount, 20000, (Handle, int* count))                                                        \
  F(CommUserRank, 20000, (Handle, int* rank))                                                      \
  F(CommCuDevice, 20000, (Handle, int* device))                                                    \
  F(CommSplit, 21800, (Handle, int color, int key, Handle* out, Config*))                          \
  F(CommShrink, 22700, (Handle, int* excluded, int count, Handle* out, Config*, int flags))        \
  F(CommRegister, 21900, (Handle, void* buffer, std::size_t size, void** out))                     \
  F(CommDeregister, 21900, (Handle, void* registration))                                           \
  F(MemAlloc, 21900, (void** out, std::size_t size))                                               \
  F(MemFree, 21900, (void* memory))                                                                \
  F(GroupStart, 20000, ())                                                                         \
  F(GroupEnd, 20000, ())                                                                           \
  F(RedOpCreatePreMulSum, 21100, (int* out, const void* factor, int type, int residence, Handle))  \
  F(RedOpDestroy, 21100, (int op, Handle))                                                         \
  F(AllReduce, 20000,                                                                              \
    (const void* send, void* recv, std::size_t count, int type, int op, Handle, Stream))           \
  F(Reduce, 20000,                                                                                 \
    (const void* send, void* recv, std::size_t count, int type, int op, int root, Handle, Stream)) \
  F(Broadcast, 20200,                                                                              \
    (const void* send, void* recv, std::size_t count, int type, int root, Handle, Stream))         \
  F(AllGather, 20000, (const void* send, void* recv, std::size_t count, int type, Handle, Stream)) \
  F(ReduceScatter, 20000,                                                                          \
    (const void* send, void* recv, std::size_t count, int type, int op, Handle, Stream))           \
  F(AlltoAll, 22800, (const void* send, void* recv, std::size_t count, int type, Handle, Stream))  \
  F(Gather, 22800,                                                                                 \
    (const void* send, void* recv, std::size_t count, int type, int root, Handle, Stream))         \
  F(Scatter, 22800,                                                                                \
    (const void* send, void* recv, std::size_t count, int type, int root, Handle, Stream))         \
  F(Send, 20700, (const void* data, std::size_t count, int type, int peer, Handle, Stream))        \
  F(Recv, 20700, (void* data, std::size_t count, int type, int peer, Handle, Stream))

}  // namespace pycollective::nccl

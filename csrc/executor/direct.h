// The direct path: collectives of ranks that share a board (transport/board.h), without messages.
// Short calls are one-shot: every rank posts its array, then reads the arrays that it needs.
// Longer calls run block by block, in at most two phases ("two-shot"). This table shows both
// phases.
//
//   exchange  Each source offers one chunk to each consumer, which combines or copies the chunks.
//   publish   Each publisher offers one chunk to all readers, which copy it out.
//
//                      exchange                                  publish
//   - all_reduce       chunk r of all arrays, to rank r          chunk r of the result
//   - reduce           all arrays, to the root
//       of many ranks, or if all arrays are mapped:
//                      chunk r of all arrays, to rank r          chunk r of the result, to the root
//   - reduce_scatter   part r of all arrays, to rank r
//   - scatter          part r of the root's array, to rank r
//   - all_to_all       part r of all arrays, to rank r
//   - broadcast                                                  the root's array
//   - gather                                                     the ranks' parts, to the root
//   - all_gather                                                 the ranks' parts
//   - barrier          no data
//
// Arrays that the peers can map are read in place. If the arrays of both ranks are mapped, both
// copy: in a gather, each rank writes its part to the root's array. In a broadcast, the root writes
// a share of each rank's array. Chunks of other arrays pass through the board's staging rings, or
// are read through the system (support/peer_memory.h). Where rank r combines chunk r, the ranks
// also write their results to the peers' mapped outputs.
//
// In an all_to_all with lengths for each pair of ranks, no rank knows all lengths. So the slots say
// if a rank's parts are equal. If the parts of all ranks are, the call is like one without lengths.
// Otherwise the board does not move them: messages do (executor/communicator.cc).
//
// With more ranks than cores, a rank that waits for its core would make the others wait. So in an
// all_reduce of one block of staged arrays, the ranks that run claim the chunks of those that do
// not.
//
// Contributions are combined in the order of the schedules named "direct", so both give the same
// bits. Half-precision types are the exception: here they are rounded once, unless the call asks
// for reproducible bits.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "reduce/reduce.h"
#include "schedule/collective.h"
#include "transport/board.h"
#include "transport/transport.h"

namespace pycollective {

// The lengths of parts. `equal`: all parts are equal. `own_equal`: this rank's parts are equal, and
// those of others may differ. `different`: this rank's parts differ.
enum class Parts : std::uint8_t { equal, own_equal, different };

// The arguments of one rank.
struct DirectCall {
  Collective collective = Collective::all_reduce;
  int root = 0;
  const std::byte* input = nullptr;  // nullptr if the rank has no input
  std::byte* output = nullptr;
  std::size_t count = 0;  // items of the array, or of one part if ranks exchange parts
  std::size_t item = 1;
  Parts parts = Parts::equal;
  DType dtype = DType::f32;
  Op op = Op::sum;
  const Reduction* reduction = nullptr;  // the function for dtype and op
  // True: half-precision sums are rounded once. False: after each contribution, as the ranks of a
  // schedule do.
  bool fused = true;
  bool past_cache = false;  // the arrays exceed the caches (support/copy.h)
};

// Combines all ranks' arrays in one pass over memory, and writes the result to each target. Writes
// the last `past_cache` targets past the caches, unless they get half-precision sums that are
// rounded after each contribution.
void combine_all(const DirectCall& call, void* const* targets, std::size_t num_targets,
                 const void* const* sources, int size, std::size_t count,
                 std::size_t past_cache = 0);

class DirectExecution {
 public:
  // Posts this rank's slot if it is free. The endpoint must have entered the call.
  DirectExecution(Endpoint& endpoint, const DirectCall& call);

  // Does all that is possible without waiting, up to about kPieceBytes.
  Progress advance();
  // For a call that is done: the ranks' parts differ, and the board has moved none of them.
  bool parts_differ() const { return parts_differ_; }
  // The ranks for which this rank waits.
  [[gnu::cold]] std::vector<int> awaited() const;

 private:
  // single: a group of one rank. offers_nothing: this rank's parts differ.
  enum class Mode { not_posted, single, one_shot, blocks, offers_nothing };
  using Counter = std::atomic<std::uint64_t> Board::Counters::*;
  using Role = bool (DirectExecution::*)(int rank) const;

  // A part of an array.
  struct Span {
    std::size_t offset, bytes;
  };
  // One chunk of each rank. All ranks compute the same blocks. `begin` and `bytes` are the offset
  // and the length in the array, or in each part.
  struct Block {
    std::size_t begin = 0;
    std::size_t bytes = 0;   // 0: no block is left
    std::size_t chunk = 0;   // length of a rank's chunk; the last ones may be shorter
    std::size_t stride = 0;  // between chunks in staging
    // Positions in the input and the output staging rings.
    std::uint64_t input_at = 0, input_end = 0;
    std::uint64_t output_at = 0, output_end = 0;
  };

  // The ranks' roles in a collective, as in the table above, and the arrays that they have.
  struct Roles;
  static const Roles& roles_of(Collective collective);
  static const Roles kDistributedReduce;
  bool contains_rank(std::uint8_t ranks, int rank) const;
  bool is_source(int rank) const;
  bool is_consumer(int rank) const;
  bool is_publisher(int rank) const;
  bool is_reader(int rank) const;
  bool is_staging(int rank) const;  // a source whose input the peers cannot read in place
  bool is_awaited(int rank) const;  // this rank needs data of it
  bool is_peer(int) const { return true; }
  bool has_exchange() const;
  bool has_publishing() const;
  // Returns true if this rank writes its whole part to its only reader, which is known once that
  // has posted: a gather.
  bool writes_part() const {
    return may_write_ && call_.collective == Collective::gather &&
           board_.peers[static_cast<std::size_t>(call_.root)].output != nullptr;
  }
  // Returns the bytes of a block that a reader copies itself if its output is mapped, and the
  // publisher's input too. The publisher writes the rest.
  std::size_t readers_share(std::size_t bytes) const;
  // A reduce in which the root combines everything.
  bool is_central() const { return call_.collective == Collective::reduce && !is_cut_; }

  std::size_t input_bytes(int rank) const;
  std::size_t output_bytes(int rank) const;
  std::size_t bytes_of(std::uint8_t length) const;
  Span chunk_of(const Block& block, int rank) const;
  Span single(const Block& block) const;
  Span input_span(const Block& block, int rank) const;   // of every input, for consumer `rank`
  Span output_span(const Block& block, int rank) const;  // of this rank's output, from `rank`

  bool post();
  bool is_one_shot() const;
  bool is_in_slot() const;
  std::uint64_t place_one_shot();
  void begin_blocks();
  Block lay_out_all();
  void end_blocks();
  void pass_over();
  bool have_all_mapped() const;
  void lay_out(Block& block) const;
  void move_to_next(Block& block) const;
  bool have_posted();
  void complete_single();
  void complete_one_shot();
  const std::byte* one_shot_data(int rank) const;
  Progress advance_blocks();
  bool try_stage();
  bool try_produce();
  bool try_claim();
  void combine_claimed();
  bool try_copy_out();
  bool try_copy_share();
  void consume(const Block& block);
  void publish(const Block& block);
  void copy_own(const Block& block);
  // Both fail the group if the peer has no such memory.
  std::byte* address_of(int peer, std::uint64_t handle, std::size_t bytes) const;
  void read_remote(int peer, std::uint64_t address, std::byte* to, std::size_t bytes) const;
  void write(std::byte* to, const std::byte* from, std::size_t bytes) const;
  void write_for_peers(std::byte* to, const std::byte* from, std::size_t bytes) const;
  bool reads_remotely(Role role) const;
  Block join_blocks(Block& block) const;
  int contributor(int i) const;
  bool is_released();
  std::byte* staged(int from, int to, const Block& block) const;
  std::byte* published(int rank, const Block& block) const;
  // Returns true if the counters of all peers with the role have reached `position`, and those of
  // the other peers the beginning of this call. `seen` caches the result.
  bool reached(Counter counter, std::uint64_t position, Role role, std::uint64_t& seen) const;
  [[gnu::cold]] std::vector<int> behind(Counter counter, std::uint64_t position, Role role) const;

  Endpoint& endpoint_;
  Board& board_;
  DirectCall call_;
  const Roles* roles_;
  std::size_t unit_;  // bytes of the array, or of one part
  std::uint64_t sequence_, fingerprint_;
  std::size_t one_shot_bytes_ = 0;
  std::uint64_t one_shot_at_ = 0;
  Mode mode_ = Mode::not_posted;
  int checked_ = 0;         // have_posted() has read the slots of the awaited ranks below this one
  bool awaits_all_ = true;  // every other rank below checked_ is awaited
  std::uint64_t input_begin_ = 0, output_begin_ = 0;  // of this call in the staging rings

  // The next block to stage, to combine or publish, and to copy out; and the end of the last one.
  Block staging_, producing_, copying_out_, last_;
  // The peers read this rank's arrays where they are, and write to its output.
  bool input_is_read_ = false, output_is_read_ = false, output_is_mapped_ = false;
  CopyWay way_ = CopyWay::plain;  // of this rank's ordinary arrays
  bool may_write_ = false;  // this rank writes to those of its readers' outputs that are mapped
  bool share_is_copied_ = false;  // this rank's share of the block copying_out_
  bool is_cut_ = false;           // rank r combines chunk r of the whole array
  bool may_distribute_ = false;   // a reduce in which all ranks work if all arrays are mapped
  std::uint64_t seen_staged_ = 0, seen_consumed_ = 0, seen_published_ = 0, seen_copied_out_ = 0;
  bool parts_differ_ = false;
  std::uint64_t equal_part_ = 0;  // bytes of each part of the ranks whose parts are equal
  std::size_t block_bytes_ = 0;   // of the first block
  int lookahead_ = 0;
  int staged_ahead_ = 0, published_ahead_ = 0;  // blocks ahead of producing_, of copying_out_
  bool shares_ = false;                         // this rank lets its peers combine its chunk
  bool all_share_ = false;                      // so do all ranks: chunks are claimed
  int claimed_ = -1;                            // the rank whose chunk this rank has claimed
};

}  // namespace pycollective

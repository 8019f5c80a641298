// The contract of each collective: the chunks of each rank's buffers, the content of the input, and
// the required content of the output. The verifier checks schedules against it, and the
// communicator lays out its buffers by it.
//
// In all_reduce, reduce, scan, exscan and broadcast, a buffer is cut into any number of equal
// chunks. A barrier's messages need no chunks. In the other collectives a chunk is a rank's *part*,
// and a buffer has either one part or one part per rank.
#pragma once

#include <cstdint>
#include <string_view>

namespace pycollective {

enum class Collective : std::uint8_t {
  all_reduce,      // Every rank gets the reduction of the ranks' buffers.
  reduce,          // The root gets the reduction.
  reduce_scatter,  // Rank i gets part i of the reduction.
  broadcast,       // Every rank gets the root's buffer.
  scatter,         // Rank i gets part i of the root's buffer.
  gather,          // The root gets every rank's part.
  all_gather,      // Every rank gets every rank's part.
  all_to_all,      // Rank i gets part i of every rank's buffer.
  barrier,         // No rank leaves before every rank has entered.
  scan,            // Rank i gets the reduction of the buffers of ranks 0 to i.
  exscan,          // Rank i gets the reduction of ranks 0 to i - 1; rank 0 gets nothing.
};
inline constexpr int kCollectives = 11;
// The number of collectives with a direct path over a board (executor/direct.h): the first ones.
inline constexpr int kDirectCollectives = 9;

std::string_view to_string(Collective collective);

bool reduces(Collective collective);
bool has_root(Collective collective);
// Returns true if rank i gets a reduction over the ranks up to i. No step then completes a mean:
// the caller divides the sum.
bool is_prefix(Collective collective);
// Returns true if a chunk is a rank's part.
bool in_parts(Collective collective);

// The number of chunks of a rank's buffers, for root 0. `chunks` is the algorithm's number of
// chunks.
int input_chunks(Collective collective, int chunks, int rank, int size);
int output_chunks(Collective collective, int chunks, int rank, int size);

// The content of a chunk of a buffer: a chunk of the data, with the contributions of ranks begin to
// end - 1.
struct Content {
  int chunk = -1;
  int begin = 0, end = 0;
};
Content initial_content(Collective collective, int rank, int size, int index);
Content final_content(Collective collective, int rank, int size, int index);

// Returns the index of a part in a buffer of `count` parts. The first part follows the last one.
inline int index_of_part(int index, int count) { return index < count ? index : index - count; }

// Returns true if a call can be in place: one buffer is a part of the other. If chunks are not
// parts, input[i] is then output[i]. Otherwise a rank's single part lies at the rank's index in the
// buffer of all parts.
bool can_be_in_place(Collective collective);

}  // namespace pycollective

// What each collective promises: which chunks a rank's buffers have, what stands in the input, what
// must stand in the output. The verifier holds schedules against it, and the communicator lays out
// its buffers by it.
//
// In all_reduce, reduce, scan, exscan and broadcast the buffers are cut into any number of equal
// chunks. In the others a chunk is a rank's *part*, and a buffer has one part or one for each rank.
#pragma once

#include <cstdint>
#include <string_view>

namespace pycollective {

enum class Collective : std::uint8_t {
  all_reduce,      // everyone gets the reduction of the ranks' buffers
  reduce,          // the root gets it
  reduce_scatter,  // rank i gets part i of it
  broadcast,       // everyone gets the root's buffer
  scatter,         // rank i gets part i of the root's buffer
  gather,          // the root gets everyone's part
  all_gather,      // everyone gets everyone's part
  all_to_all,      // rank i gets part i of every rank's buffer
  barrier,         // nobody leaves before everybody has come
  scan,            // rank i gets the reduction of the buffers of ranks 0 to i
  exscan,          // rank i gets that of ranks 0 to i - 1, and rank 0 nothing
};
inline constexpr int kCollectives = 11;
// The first ones have a direct path over a board (executor/direct.h).
inline constexpr int kDirectCollectives = 9;

std::string_view to_string(Collective collective);

bool reduces(Collective collective);
bool has_root(Collective collective);
// Returns true if each rank gets a reduction of its own, over the ranks before it. No step
// completes a mean then: the caller divides the sum.
bool is_prefix(Collective collective);
// Whether a chunk is a rank's part.
bool in_parts(Collective collective);

// Chunks of a rank's buffers, for root 0; `chunks` is the algorithm's number of them.
int input_chunks(Collective collective, int chunks, int rank, int size);
int output_chunks(Collective collective, int chunks, int rank, int size);

// The content of a place: a chunk of the data, with the contributions of ranks begin to end - 1.
struct Content {
  int chunk = -1;
  int begin = 0, end = 0;
};
Content initial_content(Collective collective, int rank, int size, int place);
Content final_content(Collective collective, int rank, int size, int place);

// Which place of a buffer of so many is meant, where spans may go on behind the last part.
inline int place_of_part(int place, int count) { return place < count ? place : place - count; }

// In place, one of the two buffers is a part of the other: input[i] is output[i] where chunks are
// not parts; the rank's single part is its own place in the buffer of all parts otherwise.
bool can_be_in_place(Collective collective);

}  // namespace pycollective

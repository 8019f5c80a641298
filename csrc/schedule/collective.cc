#include "schedule/collective.h"

#include <array>

namespace pycollective {
namespace {

// The chunks of a buffer: all chunks, one part per rank, one part, or none. The root may differ
// from the other ranks.
enum class Has : std::uint8_t { chunks, parts, part, nothing };

struct Contract {
  std::string_view name;
  bool reduces, has_root;
  Has root_input, input, root_output, output;
};

// In the order of Collective.
constexpr std::array<Contract, kCollectives> kContracts = {{
    {"all_reduce", true, false, Has::chunks, Has::chunks, Has::chunks, Has::chunks},
    {"reduce", true, true, Has::chunks, Has::chunks, Has::chunks, Has::nothing},
    {"reduce_scatter", true, false, Has::parts, Has::parts, Has::part, Has::part},
    {"broadcast", false, true, Has::chunks, Has::chunks, Has::chunks, Has::chunks},
    {"scatter", false, true, Has::parts, Has::nothing, Has::part, Has::part},
    {"gather", false, true, Has::part, Has::part, Has::parts, Has::nothing},
    {"all_gather", false, false, Has::part, Has::part, Has::parts, Has::parts},
    {"all_to_all", false, false, Has::parts, Has::parts, Has::parts, Has::parts},
    {"barrier", false, false, Has::chunks, Has::chunks, Has::chunks, Has::chunks},
    {"scan", true, false, Has::chunks, Has::chunks, Has::chunks, Has::chunks},
    {"exscan", true, false, Has::chunks, Has::chunks, Has::nothing, Has::chunks},
}};

const Contract& contract_of(Collective collective) {
  return kContracts[static_cast<std::size_t>(collective)];
}

int count(Has has, int chunks, int size) {
  switch (has) {
    case Has::chunks:
      return chunks;
    case Has::parts:
      return size;
    case Has::part:
      return 1;
    case Has::nothing:
      return 0;
  }
  return 0;
}

Content of_one(int chunk, int rank) { return {chunk, rank, rank + 1}; }

}  // namespace

std::string_view to_string(Collective collective) { return contract_of(collective).name; }
bool reduces(Collective collective) { return contract_of(collective).reduces; }
bool has_root(Collective collective) { return contract_of(collective).has_root; }
bool is_prefix(Collective collective) {
  return collective == Collective::scan || collective == Collective::exscan;
}
bool in_parts(Collective collective) { return contract_of(collective).root_input != Has::chunks; }
bool can_be_in_place(Collective collective) { return collective != Collective::all_to_all; }

int input_chunks(Collective collective, int chunks, int rank, int size) {
  const Contract& c = contract_of(collective);
  return count(rank == 0 ? c.root_input : c.input, chunks, size);
}

int output_chunks(Collective collective, int chunks, int rank, int size) {
  const Contract& c = contract_of(collective);
  return count(rank == 0 ? c.root_output : c.output, chunks, size);
}

Content initial_content(Collective collective, int rank, int size, int index) {
  switch (collective) {
    case Collective::broadcast:
    case Collective::barrier:
      return rank == 0 ? of_one(index, 0) : Content{};
    case Collective::gather:
    case Collective::all_gather:
      return of_one(rank, rank);
    case Collective::all_to_all:
      return of_one(rank * size + index, rank);
    default:
      return of_one(index, rank);
  }
}

Content final_content(Collective collective, int rank, int size, int index) {
  switch (collective) {
    case Collective::broadcast:
    case Collective::barrier:
      return of_one(index, 0);
    case Collective::scatter:
      return of_one(rank, 0);
    case Collective::gather:
    case Collective::all_gather:
      return of_one(index, index);
    case Collective::all_to_all:
      return of_one(index * size + rank, index);
    case Collective::reduce_scatter:
      return {rank, 0, size};
    case Collective::scan:
      return {index, 0, rank + 1};
    case Collective::exscan:
      return {index, 0, rank};
    default:
      return {index, 0, size};
  }
}

}  // namespace pycollective

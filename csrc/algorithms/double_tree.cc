// Double binary tree all-reduce (Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth
// broadcast, reduction and scan", 2009).
//
// The buffer has two chunks. Chunk 0 is reduced up the first tree and broadcast down again; chunk 1
// uses the second tree. In the first tree, rank 0 is the parent of the root of an in-order binary
// tree of ranks 1 … size-1. The lowest set bit of a rank is its height, so odd ranks are leaves.
// The second tree is the first with all ranks shifted by one. An inner node of one tree is thus a
// leaf of the other, and both directions of every rank's link are busy.
//
// Cost: 2 ceil(log2 size) rounds, as many as one tree takes. A rank sends and receives at most
// twice the buffer.
#include <array>
#include <bit>

#include "algorithms/algorithms.h"
#include "algorithms/function_algorithm.h"

namespace pycollective {
namespace {

// One rank's neighbours in the first tree or the second.
struct Place {
  int parent = -1;
  int count = 0;  // children
  std::array<int, 2> children{};

  Place(int rank, int size, int tree) {
    int at = (rank + tree) % size;
    auto add = [&](int child) {
      children[static_cast<std::size_t>(count++)] = (child + size - tree) % size;
    };
    if (at == 0) {
      if (size > 1) add(static_cast<int>(std::bit_floor(static_cast<unsigned>(size - 1))));
      return;
    }
    int bit = at & -at;
    int up = (at ^ bit) | bit << 1;
    if (up >= size) up = at ^ bit;
    parent = (up + size - tree) % size;
    int distance = bit / 2;
    if (distance > 0) add(at - distance);
    while (distance > 0 && at + distance >= size) distance /= 2;
    if (distance > 0) add(at + distance);
  }
  int child(int i) const { return children[static_cast<std::size_t>(i)]; }
};

Steps up(Place place, int chunk) {
  Chunks so_far = input(chunk);
  for (int i = 0; i < place.count; ++i) {
    bool last = place.parent < 0 && i == place.count - 1;
    co_yield recv_reduce(place.child(i), so_far, output(chunk), /*completes=*/last);
    so_far = output(chunk);
  }
  if (place.parent >= 0) co_yield send(place.parent, so_far);
}

Steps down(Place place, int chunk) {
  if (place.parent >= 0) co_yield recv(place.parent, output(chunk));
  for (int i = 0; i < place.count; ++i) co_yield send(place.child(i), output(chunk));
}

// A rank is a leaf in one tree and an inner node in the other. The leaf's send comes first, because
// its data is ready. The leaf's receive comes last, because no other rank waits for it. Both phases
// of the other tree run between them, so that the two trees work at the same time.
Steps double_tree(int rank, int size) {
  if (size == 1) co_yield copy(input(0, 2), output(0, 2));
  // If size is odd, the last rank is no leaf: it is an inner node in the first tree and the root of
  // the second.
  int leaf_tree = rank % 2 == 1 || rank == size - 1 ? 0 : 1, inner_tree = 1 - leaf_tree;
  Place leaf(rank, size, leaf_tree), inner(rank, size, inner_tree);
  for (const Step& step : up(leaf, leaf_tree)) co_yield step;
  for (const Step& step : up(inner, inner_tree)) co_yield step;
  for (const Step& step : down(inner, inner_tree)) co_yield step;
  for (const Step& step : down(leaf, leaf_tree)) co_yield step;
}

}  // namespace

const Algorithm& double_tree_all_reduce() {
  return algorithm<double_tree>("double_tree", Collective::all_reduce, [](int) { return 2; });
}

}  // namespace pycollective

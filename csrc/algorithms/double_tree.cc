// Double binary tree all-reduce (Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth
// broadcast, reduction and scan", 2009).
//
// The buffer has two chunks. Chunk 0 is added up the first tree and sent down it again, chunk 1 the
// second. In the first tree rank 0 stands above the in-order binary tree of ranks 1 … size-1: a
// rank's lowest set bit is its height, so that odd ranks are leaves. The second tree is the first
// with all ranks moved on by one; a rank that passes data on in one tree is a leaf of the other,
// and both directions of every rank's link are in use.
// Cost: 2 ceil(log2 size) rounds, as many as one tree takes; a rank sends at most twice the buffer
// and receives at most twice the buffer.
#include <array>
#include <bit>

#include "algorithms/algorithms.h"
#include "support/lasting.h"

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
  int steps_up() const { return count + (parent >= 0); }
};

class DoubleTree final : public Algorithm {
 public:
  std::string_view name() const override { return "double_tree"; }
  Collective collective() const override { return Collective::all_reduce; }
  int num_chunks(int) const override { return 2; }
  int num_steps(int rank, int size) const override {
    if (size == 1) return 1;
    return 2 * (Place(rank, size, 0).steps_up() + Place(rank, size, 1).steps_up());
  }

  // A rank is a leaf in one of the trees and passes data on in the other. What the leaf sends can
  // go at once, and what it gets in the end nobody waits for: they come first and last, and between
  // them the other tree's way up and down. So each tree is under way while the other is.
  Step step(int rank, int size, int k) const override {
    if (size == 1) return copy(input(0, 2), output(0, 2));
    // The last rank of an odd number is no leaf: it passes on in the first and is the second's
    // root.
    int leaf = rank % 2 == 1 || rank == size - 1 ? 0 : 1;
    Place outer(rank, size, leaf), inner(rank, size, 1 - leaf);
    if (k < outer.steps_up()) return up_step(outer, leaf, k);
    k -= outer.steps_up();
    if (k < inner.steps_up()) return up_step(inner, 1 - leaf, k);
    k -= inner.steps_up();
    if (k < inner.steps_up()) return down_step(inner, 1 - leaf, k);
    return down_step(outer, leaf, k - inner.steps_up());
  }

 private:
  static Step up_step(const Place& place, int chunk, int k) {
    Span sum = k == 0 ? input(chunk) : output(chunk);
    if (k == place.count) return send(place.parent, sum);
    bool last = place.parent < 0 && k == place.count - 1;
    return recv_reduce(place.children[static_cast<std::size_t>(k)], sum, output(chunk), last);
  }

  static Step down_step(const Place& place, int chunk, int k) {
    if (place.parent >= 0 && k-- == 0) return recv(place.parent, output(chunk));
    return send(place.children[static_cast<std::size_t>(k)], output(chunk));
  }
};

}  // namespace

const Algorithm& double_tree_all_reduce() { return lasting<DoubleTree>(); }

}  // namespace pycollective

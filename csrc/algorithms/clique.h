// Ranks that reduce among themselves what others reduce elsewhere: a half of hierarchical copy, a
// host of the hierarchical algorithm. The chunks (or lanes of chunks) have a root each, members in
// turn, so that every member does the same share of the work.
#pragma once

namespace pycollective {

// One member's view of its clique.
struct Clique {
  int size;    // members
  int member;  // this rank's place among them
  int roots;   // chunks that this member is root of

  Clique(int size, int member, int chunks)
      : size(size), member(member), roots((chunks - member + size - 1) / size) {}

  // In a phase where a root has size - 1 steps for its chunk and a member has one: the steps of a
  // whole period of `size` chunks, and of all chunks.
  int period_steps() const { return 2 * (size - 1); }
  int steps(int chunks) const { return size == 1 ? 0 : chunks - roots + roots * (size - 1); }
  // Which chunk step k of such a phase is for, and which of the root's steps it is.
  void locate(int k, int* chunk, int* turn) const {
    int period = k / period_steps(), rest = k % period_steps(), place = rest;
    *turn = 0;
    if (rest >= member + size - 1) {
      place = rest - (size - 2);
    } else if (rest >= member) {
      place = member;
      *turn = rest - member;
    }
    *chunk = period * size + place;
  }
  // The turn-th other member, in rank order.
  int other(int turn) const { return turn < member ? turn : turn + 1; }
  int root(int chunk) const { return chunk % size; }
};

}  // namespace pycollective

// The calls and messages that a program repeats (the same shape, dtype, op and root), kept
// prepared.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "executor/communicator.h"
#include "support/recent.h"

namespace pycollective {

// Lengths of an array's axes, with NumPy's type.
using Lengths = std::span<const std::intptr_t>;

// A dtype and an op, compared by address. `kept` of an entry keeps both alive.
struct Identity {
  const void *dtype = nullptr, *op = nullptr;
  bool operator==(const Identity&) const = default;
};

// The elements of an array: the dtype's name and bytes, and how to reduce them. `reducing` is
// nullptr if the call reduces nothing.
struct Elements {
  std::string type;
  std::size_t item = 0;
  const Reducing* reducing = nullptr;
};

// The arguments that identify a repeated call.
struct CallKey {
  Collective collective;
  Identity identity;
  int root;
  Lengths shape;  // of the input; on a scatter's ranks other than the root, of the output
  Parts parts = Parts::equal;  // or own_equal: the call has lengths for each rank, all equal here
};

struct RepeatedCall {
  bool fits(const CallKey& key) const;
  // Returns true if input and output overlap, but not as in a call in place. In place, they are the
  // same array, or the smaller one is this rank's part of the larger one.
  bool overlap(int rank, const char* input, const char* output) const;
  std::size_t bytes() const { return std::max(inputs, outputs) * item; }
  Lengths result() const { return {result_shape.data(), static_cast<std::size_t>(result_dims)}; }

  Collective collective;
  Identity identity;
  std::shared_ptr<void> kept;
  Parts parts = Parts::equal;
  int root = 0, dims = 0, result_dims = 0;
  std::array<std::intptr_t, CallRecord::kMaxDims> shape{}, result_shape{};
  // Items of this rank's input and output, and bytes of an item.
  std::size_t inputs = 0, outputs = 0, item = 1;
  // `direct`: the call uses the direct path. `automatic`: "auto" selects the call's algorithm.
  bool direct = false, automatic = false;
  PreparedCall prepared;  // without arrays
};

// The repeated calls and messages of one rank. The find functions return nullptr if there is no
// entry. Results of all functions are valid until the next add.
class RepeatedCalls {
 public:
  explicit RepeatedCalls(Communicator& communicator) : communicator_(communicator) {}

  const RepeatedCall* find(const CallKey& key) {
    return calls_.find([&](const RepeatedCall& call) { return call.fits(key); });
  }
  // Returns nullptr if arrays of this shape have no bytes or cannot be cut into parts.
  const RepeatedCall* add(const CallKey& key, const Elements& elements, std::shared_ptr<void> kept);

  const Envelope* find_message(const void* dtype, Lengths shape);
  const Envelope* add_message(const void* dtype, Lengths shape, const Elements& elements,
                              std::shared_ptr<void> kept);

  // An all-reduce of several arrays of one dtype, joined to one. `shapes` has kNextArray between
  // the arrays' shapes.
  const PreparedCall* find_pack(const Identity& identity, const std::vector<std::int64_t>& shapes);
  const PreparedCall* add_pack(const Identity& identity, const std::vector<std::int64_t>& shapes,
                               std::size_t items, const Elements& elements,
                               std::shared_ptr<void> kept);

 private:
  struct RepeatedMessage {
    const void* dtype;
    std::shared_ptr<void> kept;
    Envelope envelope;
  };
  struct RepeatedPack {
    Identity identity;
    std::shared_ptr<void> kept;
    std::vector<std::int64_t> shapes;
    PreparedCall prepared;
  };

  Communicator& communicator_;
  Recent<RepeatedCall, 16> calls_;
  Recent<RepeatedMessage, 8> messages_;
  Recent<RepeatedPack, 4> packs_;
};

}  // namespace pycollective

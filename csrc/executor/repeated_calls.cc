#include "executor/repeated_calls.h"

#include <algorithm>

#include "executor/call_shape.h"

namespace pycollective {

bool RepeatedCall::fits(const CallKey& key) const {
  if (collective != key.collective || identity != key.identity || root != key.root) return false;
  if (parts != key.parts) return false;
  if (static_cast<std::size_t>(dims) != key.shape.size()) return false;
  // std::equal() calls memcmp(), which takes longer than most shapes.
  for (std::size_t i = 0; i < key.shape.size(); ++i) {
    if (shape[i] != key.shape[i]) return false;
  }
  return true;
}

bool RepeatedCall::overlap(int rank, const char* input, const char* output) const {
  const std::size_t in = inputs * item, out = outputs * item;
  if (input >= output + out || output >= input + in) return false;
  if (collective == Collective::all_to_all) return true;
  const char* larger = in >= out ? input : output;
  const char* smaller = in >= out ? output : input;
  const std::size_t part = in == out ? 0 : std::min(in, out);
  return smaller != larger + static_cast<std::size_t>(rank) * part;
}

const RepeatedCall* RepeatedCalls::add(const CallKey& key, const Elements& elements,
                                       std::shared_ptr<void> kept) {
  const int size = communicator_.size();
  const auto shape = call_shape(key.collective, {key.shape.begin(), key.shape.end()},
                                communicator_.rank(), size, key.root);
  if (!shape || elements.item == 0) return nullptr;
  Array array;
  array.type = elements.type;
  array.item = elements.item;
  array.shape = shape->agreed;
  array.count = shape->count;
  const std::size_t bytes =
      array.count * array.item * (in_parts(key.collective) ? static_cast<std::size_t>(size) : 1);
  const Algorithm& selected = communicator_.select(key.collective, bytes);
  RepeatedCall call;
  call.direct = communicator_.has_board();
  const Algorithm& algorithm = call.direct ? direct_algorithm(key.collective) : selected;
  call.automatic = &selected == &algorithm;
  call.collective = key.collective;
  call.identity = key.identity;
  call.kept = std::move(kept);
  call.root = key.root;
  call.dims = static_cast<int>(key.shape.size());
  std::copy(key.shape.begin(), key.shape.end(), call.shape.begin());
  call.result_dims = static_cast<int>(shape->result.size());
  std::copy(shape->result.begin(), shape->result.end(), call.result_shape.begin());
  call.inputs = shape->inputs;
  call.outputs = shape->outputs;
  call.item = array.item;
  call.parts = key.parts;
  if (key.parts == Parts::own_equal) {
    const std::vector<std::size_t> counts(static_cast<std::size_t>(size), array.count);
    array.shape[0] = -1;  // any length
    call.prepared = communicator_.prepare_all_to_all(array, counts, counts);
    call.direct = call.automatic = true;
  } else {
    call.prepared = communicator_.prepare(algorithm, array, key.root, elements.reducing);
  }
  return calls_.add(std::move(call));
}

const Envelope* RepeatedCalls::find_message(const void* dtype, Lengths shape) {
  const RepeatedMessage* found = messages_.find([&](const RepeatedMessage& message) {
    const Envelope& envelope = message.envelope;
    return message.dtype == dtype &&
           std::equal(shape.begin(), shape.end(), envelope.shape, envelope.shape + envelope.dims);
  });
  return found ? &found->envelope : nullptr;
}

const Envelope* RepeatedCalls::add_message(const void* dtype, Lengths shape,
                                           const Elements& elements, std::shared_ptr<void> kept) {
  const std::vector<std::int64_t> lengths(shape.begin(), shape.end());
  std::uint64_t bytes = elements.item;
  for (std::int64_t length : lengths) bytes *= static_cast<std::uint64_t>(length);
  const Envelope envelope(elements.type, lengths.data(), static_cast<int>(lengths.size()), bytes);
  return &messages_.add({dtype, std::move(kept), envelope})->envelope;
}

const PreparedCall* RepeatedCalls::find_pack(const Identity& identity,
                                             const std::vector<std::int64_t>& shapes) {
  const RepeatedPack* found = packs_.find(
      [&](const RepeatedPack& pack) { return pack.identity == identity && pack.shapes == shapes; });
  return found ? &found->prepared : nullptr;
}

const PreparedCall* RepeatedCalls::add_pack(const Identity& identity,
                                            const std::vector<std::int64_t>& shapes,
                                            std::size_t items, const Elements& elements,
                                            std::shared_ptr<void> kept) {
  Array array;
  array.type = elements.type;
  array.item = elements.item;
  array.shape = shapes;
  array.count = items;
  const Algorithm& algorithm = communicator_.select(Collective::all_reduce, items * elements.item);
  return &packs_
              .add({identity, std::move(kept), shapes,
                    communicator_.prepare(algorithm, array, 0, elements.reducing)})
              ->prepared;
}

}  // namespace pycollective

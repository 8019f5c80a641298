#include "executor/call_shape.h"

#include <functional>
#include <numeric>

namespace pycollective {

std::optional<CallShape> call_shape(Collective collective, const std::vector<std::int64_t>& shape,
                                    int rank, int size, int root) {
  const bool is_root = rank == root;
  const auto items = static_cast<std::size_t>(
      std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>()));
  if (items == 0) return {};
  std::vector<std::int64_t> part = shape, whole = shape;
  if (in_parts(collective)) {
    if (shape.empty()) return {};
    whole[0] *= size;
    const bool is_cut = collective == Collective::reduce_scatter ||
                        collective == Collective::all_to_all ||
                        (collective == Collective::scatter && is_root);
    if (is_cut && shape[0] % size != 0) return {};
    if (is_cut) part[0] /= size;
  }
  const auto ranks = static_cast<std::size_t>(size);
  CallShape call{shape, shape, items, items, items};
  switch (collective) {
    case Collective::reduce:
      if (!is_root) call.outputs = 0;
      break;
    case Collective::broadcast:
      if (!is_root) call.inputs = 0;
      break;
    case Collective::reduce_scatter:
      call.result = part;
      call.count = call.outputs = items / ranks;
      break;
    case Collective::scatter:
      if (is_root) {
        call.agreed = call.result = part;
        call.count = call.outputs = items / ranks;
      } else {
        call.inputs = 0;
      }
      // The output may lack the first axis if it has one row.
      while (!call.agreed.empty() && call.agreed[0] == 1) call.agreed.erase(call.agreed.begin());
      break;
    case Collective::gather:
    case Collective::all_gather:
      call.result = whole;
      call.outputs = collective == Collective::gather && !is_root ? 0 : items * ranks;
      break;
    case Collective::all_to_all:
      call.count = items / ranks;
      break;
    default:
      break;
  }
  return call;
}

}  // namespace pycollective

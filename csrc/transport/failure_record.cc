#include "transport/failure_record.h"

#include <algorithm>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace pycollective {

FailureRecord record_of(const Failure& failure) noexcept {
  FailureRecord record{};
  record.kind = static_cast<std::uint32_t>(failure.kind_for_peers);
  for (int rank : failure.ranks()) {
    const auto place = static_cast<std::size_t>(rank);
    if (place < FailureRecord::kRanks) record.ranks[place / 64] |= std::uint64_t{1} << place % 64;
  }
  const auto& calls = failure.calls();
  for (std::size_t i = 0; i < std::min(calls.size(), std::size(record.calls)); ++i) {
    set_name(record.calls[i], calls[i]);
  }
  set_name(record.message, failure.what());
  return record;
}

std::optional<Failure> failure_in(const FailureRecord& record, int size) {
  if (record.kind > static_cast<std::uint32_t>(FailureKind::aborted)) return {};
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < FailureRecord::kRanks; ++rank) {
    if (record.ranks[rank / 64] >> rank % 64 & 1) ranks.push_back(static_cast<int>(rank));
  }
  if (!ranks.empty() && ranks.back() >= size) return {};
  const auto kind = static_cast<FailureKind>(record.kind);
  std::vector<std::string> calls;
  for (const auto& call : record.calls) {
    if (call[0]) calls.emplace_back(text_in(call));
  }
  const std::size_t most = kind == FailureKind::mismatch ? ranks.size() : 1;
  if (calls.size() > most) return {};
  return Failure(kind, std::string(text_in(record.message)), std::move(ranks), std::move(calls));
}

}  // namespace pycollective

// The hierarchical all-reduce, for groups in which several ranks share a host.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/step.h"

namespace pycollective {

class Hierarchical final : public Algorithm {
 public:
  // hosts[r] is the number of rank r's host. Hosts are numbered from 0 without gaps. Throws
  // std::invalid_argument for other numbers, or if `hosts` is empty.
  explicit Hierarchical(std::vector<int> hosts);

  std::string_view name() const override { return "hierarchical"; }
  Collective collective() const override { return Collective::all_reduce; }
  int num_chunks(int size) const override;
  Steps steps(int rank, int size) const override;
  std::uint64_t fingerprint() const override { return fingerprint_; }

 private:
  int hosts() const { return static_cast<int>(ranks_.size()); }

  std::vector<int> host_of_, member_of_;
  std::vector<std::vector<int>> ranks_;  // by host
  int lanes_ = 0;
  std::uint64_t fingerprint_ = 0;
};

}  // namespace pycollective

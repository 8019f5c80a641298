#include "executor/task.h"

namespace pycollective {

Task::OnDropped Task::on_dropped = nullptr;

void Task::drop() noexcept {
  if (!origin_.is_here() || !on_dropped) return;
  try {
    if (group_->is_first_drop(rank_)) on_dropped(rank_, call_, error_);
  } catch (...) {  // no memory: the error stays unreported
  }
}

}  // namespace pycollective

#include "transport/board.h"

#include <utility>

namespace pycollective {

Board::Board(std::byte* memory, int rank, std::vector<WaitQueue*> queues, bool with_staging)
    : sources(queues.size()),
      targets(queues.size()),
      memory_(memory),
      stride_(bytes_for(1, with_staging)),
      input_bytes_(with_staging ? kInputStagingBytes : 4 * kOneShotBytes),
      rank_(rank),
      queues_(std::move(queues)),
      own_queue_(queues_[static_cast<std::size_t>(rank)]) {}

std::size_t Board::bytes_for(int size, bool with_staging) {
  std::size_t staging = with_staging ? kInputStagingBytes + kOutputStagingBytes : 4 * kOneShotBytes;
  return static_cast<std::size_t>(size) * (kStagingAt + staging);
}

}  // namespace pycollective

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <system_error>
#include <utility>

#include "support/round_up.h"
#include "support/shared_memory.h"

namespace pycollective {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr int kCollapse = 25;  // MADV_COLLAPSE, since Linux 6.1
// F_SEAL_SEAL: no process may add seals, because F_SEAL_GROW would break the arena's growth.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_SEAL;

constexpr const char* kCannotMap =
    "cannot map shared memory (free memory, `ulimit -v` and vm.max_map_count limit it)";

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(other.size_), begin_(other.begin_) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(begin_, other.begin_);
  return *this;
}

Mapping::~Mapping() {
  if (data_) munmap(data_, size_);
}

void Mapping::use_huge_pages() const noexcept {
  (void)madvise(data_, size_, MADV_HUGEPAGE);
  (void)madvise(data_, size_, MADV_DONTDUMP);
}

void Mapping::populate(std::byte* begin, std::size_t bytes) const noexcept {
#ifdef MADV_POPULATE_WRITE                           // since Linux 5.14
  (void)madvise(begin, bytes, MADV_POPULATE_WRITE);  // a hint; begin is a multiple of the page size
#else
  (void)begin, (void)bytes;
#endif
  // Huge pages make copies of large arrays faster. This call also works where the system's
  // settings give shared memory no huge pages.
  const auto first = round_up(reinterpret_cast<std::uintptr_t>(begin), kHugePage);
  const auto last = reinterpret_cast<std::uintptr_t>(begin + bytes) / kHugePage * kHugePage;
  if (first < last) (void)madvise(reinterpret_cast<void*>(first), last - first, kCollapse);
}

SharedMemory SharedMemory::create(std::size_t bytes) {
  SharedMemory memory(memfd_create("pycollective", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (memory.descriptor_ < 0) fail("cannot create shared memory (memfd_create)");
  if (ftruncate(memory.descriptor_, static_cast<off_t>(bytes)) != 0) {
    fail("cannot set the size of shared memory");
  }
  if (fcntl(memory.descriptor_, F_ADD_SEALS, kSeals) != 0) fail("cannot seal shared memory");
  return memory;
}

SharedMemory SharedMemory::open(int descriptor) {
  SharedMemory found(fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
  if (found.descriptor_ < 0) {
    fail(errno == EBADF ? "not a descriptor of shared memory" : "cannot duplicate a descriptor");
  }
  int seals = fcntl(found.descriptor_, F_GET_SEALS);
  if (seals < 0) fail("not a descriptor of shared memory");
  if ((seals & kSeals) != kSeals) {
    errno = EPERM;
    fail("the shared memory is not sealed: another process could shrink it");
  }
  return found;
}

std::size_t SharedMemory::size() const {
  struct stat facts;
  if (fstat(descriptor_, &facts) != 0) fail("cannot read the size of shared memory");
  return static_cast<std::size_t>(facts.st_size);
}

Mapping SharedMemory::map(std::uint64_t begin, std::size_t bytes) const {
  // Other ranks may grow the memory at the same time. ftruncate() then fails instead of shrinking
  // it, because the memory is sealed.
  if (size() < begin + bytes && ftruncate(descriptor_, static_cast<off_t>(begin + bytes)) != 0 &&
      size() < begin + bytes) {
    fail("cannot enlarge shared memory");
  }
  // Huge pages need the address and the offset in the memory to be equal modulo the huge page's
  // size.
  void* space = mmap(nullptr, bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (space == MAP_FAILED) fail(kCannotMap);
  auto* first = static_cast<std::byte*>(space);
  const auto address = reinterpret_cast<std::uintptr_t>(space);
  const std::size_t before = (begin + kHugePage - address % kHugePage) % kHugePage;
  void* place = mmap(first + before, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                     descriptor_, static_cast<off_t>(begin));
  const int error = errno;
  if (before > 0) munmap(first, before);
  const std::size_t end = before + round_up(bytes, kPage);
  if (end < bytes + kHugePage) munmap(first + end, bytes + kHugePage - end);
  if (place == MAP_FAILED) {
    munmap(first + before, bytes);
    errno = error;
    fail(kCannotMap);
  }
  return Mapping(static_cast<std::byte*>(place), bytes, begin);
}

void SharedMemory::reserve(Mapping& mapping, std::byte* begin, std::size_t bytes) const {
  auto at = static_cast<off_t>(mapping.begin() + static_cast<std::size_t>(begin - mapping.data()));
  while (fallocate(descriptor_, 0, at, static_cast<off_t>(bytes)) != 0) {
    if (errno != EINTR) fail("cannot reserve shared memory");
  }
  mapping.populate(begin, bytes);
}

void SharedMemory::discard(const Mapping& mapping, std::byte* begin,
                           std::size_t bytes) const noexcept {
  auto at = static_cast<off_t>(mapping.begin() + static_cast<std::size_t>(begin - mapping.data()));
  (void)fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at,
                  static_cast<off_t>(bytes));
}

bool SharedMemory::isolate(const Mapping& mapping, std::byte* begin,
                           std::size_t bytes) const noexcept {
  auto at = static_cast<off_t>(mapping.begin() + static_cast<std::size_t>(begin - mapping.data()));
  return bytes == 0 || mmap(begin, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED,
                            descriptor_, at) != MAP_FAILED;
}

void SharedMemory::detach(const Mapping& mapping, std::byte* begin,
                          std::size_t bytes) const noexcept {
  if (!isolate(mapping, begin, bytes)) return;
  for (std::size_t at = 0; at < bytes; at += kPage) {  // a write copies the page
    reinterpret_cast<volatile std::atomic<unsigned char>*>(begin + at)->fetch_or(0);
  }
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (descriptor_ < 0) return;
  int error = errno;  // close() must not change the errno of an exception in flight
  close(descriptor_);
  errno = error;
}

}  // namespace pycollective

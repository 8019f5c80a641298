#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "support/shared_memory.h"

namespace pycollective {
namespace {

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

[[noreturn]] void fail_to_duplicate() {
  fail(errno == EBADF ? "not a descriptor of shared memory" : "cannot duplicate a descriptor");
}

}  // namespace

SharedMemory SharedMemory::create(std::size_t bytes) {
  int descriptor = memfd_create("pycollective", MFD_CLOEXEC);
  if (descriptor < 0) fail("cannot make shared memory (memfd_create)");
  if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
    int error = errno;
    close(descriptor);
    errno = error;
    fail("cannot size shared memory");
  }
  return SharedMemory(descriptor, 0, bytes);
}

SharedMemory SharedMemory::open(int descriptor) {
  int copy = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) fail_to_duplicate();
  struct stat facts;
  if (fstat(copy, &facts) != 0 || !S_ISREG(facts.st_mode) || facts.st_size <= 0) {
    close(copy);
    errno = EINVAL;
    fail("not a descriptor of shared memory");
  }
  return SharedMemory(copy, 0, static_cast<std::size_t>(facts.st_size));
}

SharedMemory SharedMemory::part(int descriptor, std::size_t begin, std::size_t bytes) {
  int copy = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) fail_to_duplicate();
  struct stat facts;
  auto needed = static_cast<off_t>(begin + bytes);
  if (fstat(copy, &facts) != 0 || (facts.st_size < needed && ftruncate(copy, needed) != 0)) {
    int error = errno;
    close(copy);
    errno = error;
    fail("cannot enlarge shared memory");
  }
  return SharedMemory(copy, begin, bytes);
}

SharedMemory::SharedMemory(int descriptor, std::size_t begin, std::size_t size)
    : descriptor_(descriptor), begin_(begin), size_(size) {
  void* place = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor,
                     static_cast<off_t>(begin));
  if (place == MAP_FAILED) {
    int error = errno;
    close(descriptor);
    errno = error;
    fail("cannot map shared memory");
  }
  data_ = static_cast<std::byte*>(place);
}

void SharedMemory::populate(std::byte* begin, std::size_t bytes) noexcept {
#ifdef MADV_POPULATE_WRITE                           // Linux 5.14
  (void)madvise(begin, bytes, MADV_POPULATE_WRITE);  // begin is on a page; a hint, in any case
#else
  (void)begin, (void)bytes;
#endif
}

void SharedMemory::reserve(std::byte* begin, std::size_t bytes) {
  auto at = static_cast<off_t>(begin_ + static_cast<std::size_t>(begin - data_));
  if (fallocate(descriptor_, 0, at, static_cast<off_t>(bytes)) != 0) fail("no memory to share");
  populate(begin, bytes);
}

void SharedMemory::discard(std::byte* begin, std::size_t bytes) const noexcept {
  auto at = static_cast<off_t>(begin_ + static_cast<std::size_t>(begin - data_));
  (void)fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at,
                  static_cast<off_t>(bytes));
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      begin_(other.begin_),
      data_(std::exchange(other.data_, nullptr)),
      size_(other.size_) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(begin_, other.begin_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_) munmap(data_, size_);
  if (descriptor_ >= 0) close(descriptor_);
}

}  // namespace pycollective

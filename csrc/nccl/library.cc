#include "nccl/library.h"

#include <dlfcn.h>

#include <cstring>

namespace pycollective::nccl {
namespace {

// The first version with non-blocking communicators and their configuration.
constexpr int kOldest = 21400;

template <typename Function>
void find(void* opened, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(opened, name));
}

}  // namespace

std::string version_text(int version) {
  int major = version / 10000, minor = version / 100 % 100;
  if (version < 10000) major = version / 1000, minor = version / 100 % 10;  // before version 2.9
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(version % 100);
}

std::shared_ptr<Library> Library::open(const std::string& name, bool loaded) {
  void* opened = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | (loaded ? RTLD_NOLOAD : 0));
  if (!opened) {
    const char* why = dlerror();
    throw LoadError(why ? why : name + " is not loaded");
  }
  return std::shared_ptr<Library>(new Library(opened));
}

Library::Library(void* opened) {
#define PYCOLLECTIVE_FIND(name, first, parameters) find(opened, "nccl" #name, functions_.name);
  PYCOLLECTIVE_NCCL_FUNCTIONS(PYCOLLECTIVE_FIND)
#undef PYCOLLECTIVE_FIND
  find(opened, "ncclGetErrorString", functions_.GetErrorString);
  find(opened, "ncclGetLastError", functions_.GetLastError);
  Dl_info found;
  if (functions_.GetVersion &&
      dladdr(reinterpret_cast<void*>(functions_.GetVersion), &found) != 0) {
    path_ = found.dli_fname;
  }
  if (!functions_.GetVersion || functions_.GetVersion(&version_) != Result::success) {
    throw LoadError("it is not NCCL: ncclGetVersion is missing or fails");
  }
  if (version_ < kOldest || !functions_.CommInitRankConfig) {
    throw LoadError(path_ + " is NCCL " + version_text(version_) +
                        ", which is too old: " + version_text(kOldest) + " or newer is needed",
                    /*is_too_old=*/true);
  }
}

std::string Library::error_text(int code) const {
  const char* text =
      functions_.GetErrorString ? functions_.GetErrorString(static_cast<Result>(code)) : nullptr;
  return text ? text : "error " + std::to_string(code);
}

void Library::missing(const char* name, int first) const {
  throw Error("NCCL " + version_text(version_) + " (" + path_ + ") has no " + name +
                  ", which came with " + version_text(first),
              0);
}

void Library::fail(Result result, const char* name, Handle handle) const {
  int code = static_cast<int>(result);
  std::string message = std::string(name) + " failed: " + error_text(code);
  const char* more = functions_.GetLastError ? functions_.GetLastError(handle) : nullptr;
  if (more && *more) message += std::string(": ") + more;
  while (message.ends_with('\n')) message.pop_back();
  throw Error(message, code);
}

UniqueId Library::unique_id() const {
  UniqueId id{};
  PYCOLLECTIVE_NCCL_CALL(*this, nullptr, GetUniqueId, &id);
  return id;
}

void Library::group_start() const { PYCOLLECTIVE_NCCL_CALL(*this, nullptr, GroupStart); }

void Library::group_end() const { PYCOLLECTIVE_NCCL_CALL(*this, nullptr, GroupEnd); }

void* Library::allocate(std::size_t size) const {
  void* memory = nullptr;
  PYCOLLECTIVE_NCCL_CALL(*this, nullptr, MemAlloc, &memory, size);
  return memory;
}

void Library::release(void* memory) const {
  PYCOLLECTIVE_NCCL_CALL(*this, nullptr, MemFree, memory);
}

}  // namespace pycollective::nccl

// NCCL's library, loaded at run time.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

#include "nccl/api.h"

namespace pycollective::nccl {

// A failed call of NCCL. `code` is its ncclResult_t, or 0 if NCCL was not called.
class Error : public std::runtime_error {
 public:
  Error(const std::string& message, int code) : std::runtime_error(message), code(code) {}
  int code;
};

// There is no usable library; the message has the reason.
class LoadError : public std::runtime_error {
 public:
  explicit LoadError(const std::string& message, bool is_too_old = false)
      : std::runtime_error(message), is_too_old(is_too_old) {}
  bool is_too_old;
};

// Returns a text such as "2.27.3".
std::string version_text(int version);

#define PYCOLLECTIVE_DECLARE(name, since, parameters) Result(*name) parameters = nullptr;
// A function that the library is too old to have is nullptr.
struct Functions {
  PYCOLLECTIVE_NCCL_FUNCTIONS(PYCOLLECTIVE_DECLARE)
  const char* (*GetErrorString)(Result) = nullptr;
  const char* (*GetLastError)(Handle) = nullptr;
};
#undef PYCOLLECTIVE_DECLARE

#define PYCOLLECTIVE_DECLARE(name, version, parameters) constexpr int name = version;
namespace since {
PYCOLLECTIVE_NCCL_FUNCTIONS(PYCOLLECTIVE_DECLARE)
}
#undef PYCOLLECTIVE_DECLARE

class Library {
 public:
  // Loads a library by name or path. It is never unloaded, because NCCL has threads of its own.
  // `loaded`: find only a library that this process has loaded already. Throws LoadError.
  static std::shared_ptr<Library> open(const std::string& name, bool loaded);

  int version() const { return version_; }
  const std::string& path() const { return path_; }  // of the file
  const Functions& functions() const { return functions_; }
  std::string error_text(int code) const;

  UniqueId unique_id() const;
  // Calls of one thread between group_start() and group_end() are collected, and made at the end.
  void group_start() const;
  void group_end() const;
  void* allocate(std::size_t size) const;
  void release(void* memory) const;

  // Calls a function. Throws if the library lacks it or if it fails; `handle` is used to get the
  // reason.
  template <typename... Parameters, typename... Arguments>
  void call(Result (*function)(Parameters...), const char* name, int first, Handle handle,
            Arguments... arguments) const {
    if (!function) missing(name, first);
    Result result = function(arguments...);
    if (result != Result::success && result != Result::in_progress) fail(result, name, handle);
  }

 private:
  explicit Library(void* opened);
  [[noreturn]] void missing(const char* name, int first) const;
  [[noreturn]] void fail(Result result, const char* name, Handle handle) const;

  Functions functions_;
  int version_ = 0;
  std::string path_;
};

// Calls ncclNAME of a library.
#define PYCOLLECTIVE_NCCL_CALL(library, handle, name, ...)              \
  (library).call((library).functions().name, "nccl" #name, since::name, \
                 handle __VA_OPT__(, ) __VA_ARGS__)

}  // namespace pycollective::nccl

#include "bindings/bindings.h"

namespace pycollective {

const char* const kVersion = PYCOLLECTIVE_VERSION;
const char* const kCompiler = PYCOLLECTIVE_COMPILER;

}  // namespace pycollective

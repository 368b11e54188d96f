// The call that rounds rows of a weight (rounding.h). It is no custom call of XLA's, because weights are rounded on the host before
// they are arrays of a device.

#include <memory>
#include <new>

#include "rounding.h"
#include "variants.h"

namespace jaxserve {
namespace {

RoundRows fastest() {
#if defined(__x86_64__)
  if (may(kRounding, kAvx512)) return kRoundAvx512;
  if (may(kRounding, kAvx2)) return kRoundAvx2;
#endif
  return kRoundBaseline;
}

}  // namespace
}  // namespace jaxserve

// Rounds the rows, and returns whether there was enough memory to do so. `zeros` is null for a symmetric weight.
extern "C" bool jaxserve_round_rows(const void* w, bool bfloat16, int64_t rows, int64_t size, int64_t group, int64_t bits, uint8_t* codes,
                                    uint16_t* scales, uint16_t* zeros) {
  const jaxserve::RoundedRows all = {w, bfloat16, rows, size, group, static_cast<int>(bits), codes, scales, zeros};
  const auto floats = static_cast<size_t>(jaxserve::rounding_scratch_bytes(all)) / 4 + 1;
  const std::unique_ptr<float[]> scratch(new (std::nothrow) float[floats]);
  if (!scratch) return false;
  jaxserve::fastest()(all, scratch.get());
  return true;
}

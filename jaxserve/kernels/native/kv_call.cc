// The XLA custom call that writes keys and values [T, K, 2, D] into a KV pool in place.

#include "kv.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

ffi::Error kv_write(ffi::AnyBuffer numbers, Slots slots, ffi::RemainingArgs pool, ffi::RemainingRets written) {
  auto writing = std::make_shared<Writing>();
  auto error = prepare_writing(*writing, numbers, slots, pool, written);
  if (error.failure()) return error;
  if (writing->groups != 0) return ffi::Error::InvalidArgument("kv_write: operands must have no queries besides keys and values");
  Writing::run(writing);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_kv_write, jaxserve::kv_write,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<jaxserve::Slots>()
                                  .RemainingArgs()
                                  .RemainingRets());

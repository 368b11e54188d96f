// Custom calls for KV pools whose memory the operating system commits when it is first written, and takes back again.
//
// XLA allocates results with malloc. Of a large one that is address space alone, until somebody writes; a small one
// may be memory that was freed a moment ago, with its contents. MADV_DONTNEED makes both the same on Linux: whole OS
// pages of private anonymous memory, and malloc has no other, are given back and read as zero until they are written
// (madvise(2)). Elsewhere it promises no zeros: there pools are cleared by hand and never shrink.

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

// Gives the whole OS pages of [begin, end) back, which then read as zero; returns 0 or errno. With `clear` the rest of
// the range is zeroed too.
int discard(char* begin, char* end, bool clear) {
#if defined(__linux__)
  const uintptr_t size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto up = [&](char* p) { return p + (size - reinterpret_cast<uintptr_t>(p) % size) % size; };
  char* const first = up(begin);
  char* const last = end - reinterpret_cast<uintptr_t>(end) % size;
  if (first < last && madvise(first, static_cast<size_t>(last - first), MADV_DONTNEED) != 0) return errno;
  if (clear && first < last) {
    memset(begin, 0, static_cast<size_t>(first - begin));
    memset(last, 0, static_cast<size_t>(end - last));
  } else if (clear) {
    memset(begin, 0, static_cast<size_t>(end - begin));
  }
  return 0;
#else
  (void)begin, (void)end, (void)clear;
  return ENOSYS;
#endif
}

// Zeros that take no memory yet, as far as the platform can do that.
ffi::Error reserve(ffi::Result<ffi::AnyBuffer> pool) {
  auto* begin = static_cast<char*>(pool->untyped_data());
  const size_t size = pool->size_bytes();
  if (discard(begin, begin + size, true) != 0) memset(begin, 0, size);
  return ffi::Error::Success();
}

using Range = ffi::Buffer<ffi::S32, 1>;

// Gives the memory of the pool's pages [first, last) back, as far as whole OS pages lie in them. The pool stays where
// it is.
ffi::Error release(ffi::AnyBuffer pool, Range range, ffi::Result<ffi::AnyBuffer> out) {
  const int64_t pages = pool.dimensions()[0], first = range.typed_data()[0], last = range.typed_data()[1];
  if (pool.untyped_data() != out->untyped_data()) return ffi::Error::Internal("release_pages: the pool was copied");
  if (first < 0 || last < first || last > pages) {
    return ffi::Error::InvalidArgument("release_pages: pages " + std::to_string(first) + " to " + std::to_string(last) +
                                       " of a pool of " + std::to_string(pages) + " pages");
  }
  auto* begin = static_cast<char*>(out->untyped_data());
  const int64_t page_bytes = pages ? static_cast<int64_t>(pool.size_bytes()) / pages : 0;
  const int error = discard(begin + first * page_bytes, begin + last * page_bytes, false);
  if (error == ENOSYS) return ffi::Error(ffi::ErrorCode::kUnimplemented, "release_pages: needs Linux");
  if (error != 0) return ffi::Error::Internal("release_pages: madvise: " + std::string(strerror(error)));
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_reserve_pool, jaxserve::reserve, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_release_pages, jaxserve::release,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<jaxserve::Range>()
                                  .Ret<ffi::AnyBuffer>());

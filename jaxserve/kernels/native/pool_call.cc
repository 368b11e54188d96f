// Custom calls for KV pools whose memory the operating system commits at the first write, and takes back on request.
//
// XLA allocates results with malloc. A large result is only address space until its first write. A small one may be reused memory
// with its old contents. On Linux MADV_DONTNEED makes both equal: whole OS pages of private anonymous memory, which is all that
// malloc returns, are given back and then read as zero until they are written (madvise(2)). Other systems do not promise zeros, so
// there pools are cleared explicitly and never shrink.

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

struct Range {
  char* begin;
  char* end;
  size_t size() const { return static_cast<size_t>(end - begin); }
};

#if defined(__linux__)

// Returns the whole OS pages within a range.
Range whole_pages(Range range) {
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  char* const begin = range.begin + (page - reinterpret_cast<uintptr_t>(range.begin) % page) % page;
  char* const end = range.end - reinterpret_cast<uintptr_t>(range.end) % page;
  return begin < end ? Range{begin, end} : Range{range.begin, range.begin};
}

// Gives whole OS pages back; they then read as zero. Returns 0 or errno.
int discard(Range pages) {
  return pages.size() == 0 || madvise(pages.begin, pages.size(), MADV_DONTNEED) == 0 ? 0 : errno;
}

// Requests huge pages, with which attention takes 7 to 20 % less time and a first touch half as long. Does nothing if they are
// larger than the granule of kernels/elastic.py: with OS pages of 64 KB they have 512 MB.
void request_huge_pages(Range pages) {
  constexpr size_t granule = size_t{2} << 20;
  size_t size = 0;
  std::ifstream("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size") >> size;
  if (size != 0 && size <= granule) madvise(pages.begin, pages.size(), MADV_HUGEPAGE);  // a failure has no other effect
}

#endif

// Returns zeros that take no memory before the first write, if the platform supports that.
ffi::Error reserve(ffi::Result<ffi::AnyBuffer> out) {
  auto* begin = static_cast<char*>(out->untyped_data());
  const Range pool = {begin, begin + out->size_bytes()};
#if defined(__linux__)
  const Range pages = whole_pages(pool);
  if (discard(pages) == 0) {
    memset(pool.begin, 0, Range{pool.begin, pages.begin}.size());
    memset(pages.end, 0, Range{pages.end, pool.end}.size());
    request_huge_pages(pages);
    return ffi::Error::Success();
  }
#endif
  memset(pool.begin, 0, pool.size());
  return ffi::Error::Success();
}

using PageIds = ffi::Buffer<ffi::S32, 1>;

// Gives back the memory of the whole OS pages within the pool's pages [first, last). The pool does not move.
ffi::Error release(ffi::AnyBuffer pool, PageIds range, ffi::Result<ffi::AnyBuffer> out) {
  const int64_t pages = pool.dimensions()[0], first = range.typed_data()[0], last = range.typed_data()[1];
  if (pool.untyped_data() != out->untyped_data()) return ffi::Error::Internal("release_pages: the pool was copied");
  if (first < 0 || last < first || last > pages) {
    return ffi::Error::InvalidArgument("release_pages: pages " + std::to_string(first) + " to " + std::to_string(last) +
                                       " are outside a pool of " + std::to_string(pages) + " pages");
  }
#if defined(__linux__)
  auto* begin = static_cast<char*>(out->untyped_data());
  const int64_t page_bytes = pages ? static_cast<int64_t>(pool.size_bytes()) / pages : 0;
  const int error = discard(whole_pages({begin + first * page_bytes, begin + last * page_bytes}));
  if (error != 0) return ffi::Error::Internal("release_pages: madvise: " + std::string(strerror(error)));
  return ffi::Error::Success();
#else
  return ffi::Error(ffi::ErrorCode::kUnimplemented, "release_pages: needs Linux");
#endif
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_reserve_pool, jaxserve::reserve, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_release_pages, jaxserve::release,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<jaxserve::PageIds>()
                                  .Ret<ffi::AnyBuffer>());

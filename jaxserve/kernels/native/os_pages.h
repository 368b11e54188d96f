// Memory in whole pages of the operating system, which can be given back to it.

#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace jaxserve {

struct Range {
  char* begin;
  char* end;
  size_t size() const { return static_cast<size_t>(end - begin); }
};

#if defined(__linux__)

// Returns the whole OS pages within a range.
inline Range whole_pages(Range range) {
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  char* const begin = range.begin + (page - reinterpret_cast<uintptr_t>(range.begin) % page) % page;
  char* const end = range.end - reinterpret_cast<uintptr_t>(range.end) % page;
  return begin < end ? Range{begin, end} : Range{range.begin, range.begin};
}

// Gives whole OS pages back; they then read as zero. Returns 0 or errno.
inline int discard(Range pages) {
  return pages.size() == 0 || madvise(pages.begin, pages.size(), MADV_DONTNEED) == 0 ? 0 : errno;
}

#endif

}  // namespace jaxserve

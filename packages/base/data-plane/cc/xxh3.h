// XXH3, inlined for the machine's own vector width. Include this, never <xxhash.h>, so that every file sees the same inline
// form and the one known false alarm of g++ 12 in its AVX-512 intrinsics (GCC bug 105593) stays here.
#pragma once
#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <xxhash.h>
#pragma GCC diagnostic pop

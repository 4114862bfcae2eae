#include "cpu_level.h"

#include <atomic>
#include <cstring>

#ifdef JAXKV_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jaxkv {
namespace {

#ifdef JAXKV_AMX
// Whether the CPU has tiles of bf16, and the kernel lets this process use them: it is asked once, for all threads.
bool amx_allowed() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kTilesOfBf16 = 1u << 22 | 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTilesOfBf16) != kTilesOfBf16) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

// The tables that this CPU can run, slowest first.
struct Levels {
  const Kernels* tables[5];
  int count = 0;

  Levels() {
    tables[count++] = &generic_kernels();
#ifdef JAXKV_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
      tables[count++] = &avx2_kernels();
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        tables[count++] = &avx512_kernels();
#ifdef JAXKV_AVX512_BF16
        if (__builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
            __builtin_cpu_supports("avx512bf16")) {
          tables[count++] = &avx512_bf16_kernels();
#ifdef JAXKV_AMX
          if (amx_allowed()) tables[count++] = &amx_kernels();
#endif
        }
#endif
      }
    }
#endif
  }
};

const Levels& levels() {
  static const Levels found;
  return found;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> table{levels().tables[levels().count - 1]};
  return table;
}

}  // namespace

const Kernels& kernels() { return *chosen().load(std::memory_order_acquire); }

}  // namespace jaxkv

const char* jaxkv_level() { return jaxkv::kernels().name; }

int jaxkv_set_level(const char* name) {
  const jaxkv::Levels& found = jaxkv::levels();
  for (int i = 0; i < found.count; ++i) {
    if (std::strcmp(found.tables[i]->name, name) == 0) {
      jaxkv::chosen().store(found.tables[i], std::memory_order_release);
      return 0;
    }
  }
  return 1;
}

int jaxkv_has_int8_products() { return jaxkv::kernels().int8_products.product != nullptr; }

#include "cpu_level.h"

#include <atomic>
#include <cstring>

namespace jaxkv {
namespace {

// The tables that this CPU can run, slowest first.
struct Levels {
  const Kernels* tables[3];
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

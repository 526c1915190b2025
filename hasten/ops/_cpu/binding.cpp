// Loads the library of a level and spreads its work over torch's threads.
#include "binding.h"

#include <ATen/native/CPUBlas.h>
#include <dlfcn.h>
#include <torch/library.h>

namespace hasten {
namespace {

Level chosen;

void brgemm_bf16(int64_t M, int64_t N, int64_t K, int64_t lda, int64_t ldb, int64_t ldc, bool add,
                 const void* A, const void* B, float* C) {
    at::native::cpublas::brgemm(M, N, K, lda, ldb, ldc, add, (const at::BFloat16*)A, (const at::BFloat16*)B,
                                C);
}

// The library stays loaded: its table is in use for the life of the process.
std::string load(std::string path, bool bf16, bool brgemm, int64_t l2_bytes) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(library, "hasten: ", dlerror());
    auto kernels = (const Kernels* (*)())dlsym(library, "hasten_kernels");
    TORCH_CHECK(kernels, "hasten: ", path, " is no library of kernels: ", dlerror());
    chosen = {kernels(), bf16, brgemm ? brgemm_bf16 : nullptr, l2_bytes};
    return chosen.kernels->level;
}

}  // namespace

const Level& level() {
    TORCH_CHECK(chosen.kernels, "hasten: no level is loaded; import hasten.ops.native first");
    return chosen;
}

void release_brgemm() {
    at::native::cpublas::brgemm_release();
}

}  // namespace hasten

TORCH_LIBRARY(hasten_cpu, m) {
    m.def("load(str path, bool bf16, bool brgemm, int l2_bytes) -> str", hasten::load);
}

#include "chosen.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace hasten {

std::atomic<int64_t> launches{0};

static Level chosen;

const Level& level() {
    if (!chosen.kernels)
        throw std::runtime_error("hasten: no level is loaded; import hasten.ops.level first");
    return chosen;
}

void lend(Brgemm (*brgemm)(), void (*release)()) {
    chosen.brgemm = brgemm;
    chosen.release = release;
}

void choose(const char* path, Level with) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(std::string("hasten: ") + dlerror());
    auto kernels = (const Kernels* (*)())dlsym(library, "hasten_kernels");
    if (!kernels) throw std::runtime_error(std::string("hasten: no library of kernels: ") + dlerror());
    with.kernels = kernels();
    chosen = with;
}

}  // namespace hasten

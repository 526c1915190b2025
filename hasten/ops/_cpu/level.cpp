// The one symbol that a level's library exports.
#include "kernels.h"
#include "vec.h"

#define HASTEN_NAME_(x) #x
#define HASTEN_NAME(x) HASTEN_NAME_(x)

extern "C" __attribute__((visibility("default"))) const hasten::Kernels* hasten_kernels() {
    static const hasten::Kernels table = [] {
        hasten::Kernels t{};
        t.level = HASTEN_NAME(HASTEN_LEVEL);
        t.width = hasten::W;
        hasten::fingerprint_kernels(t);
        hasten::attention_forward_kernels(t);
        hasten::attention_backward_kernels(t);
        hasten::cross_entropy_kernels(t);
        hasten::adamw_kernels(t);
        hasten::embedding_kernels(t);
        hasten::norm_forward_kernels(t);
        hasten::norm_backward_kernels(t);
        hasten::rotary_kernels(t);
        hasten::activation_kernels(t);
        hasten::gated_activation_kernels(t);
        hasten::program_rows_kernels(t);
        hasten::program_attention_kernels(t);
        hasten::panel_kernels(t);
        hasten::sampling_kernels(t);
        return t;
    }();
    return &table;
}

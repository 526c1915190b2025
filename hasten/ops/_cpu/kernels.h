// What a level's library offers, as plain C: one table of functions over raw pointers. No torch here, so that
// a level compiles in seconds and shares no inline code with another.
//
// Every function does one item of work (`item` counts from 0); the caller spreads items over threads.
#pragma once

#include <cstdint>

namespace hasten {

enum class Type : int32_t { f32 = 0, bf16 = 1, f16 = 2 };

// torch's exported product for AMX: C [M, N] (+)= A [M, K] B, B in VNNI order; sizes and strides in elements.
using Brgemm = void (*)(int64_t M, int64_t N, int64_t K, int64_t lda, int64_t ldb, int64_t ldc, bool add,
                        const void* A, const void* B, float* C);

struct Attention {
    Type type;
    bool bf16;  // products of bf16 pairs; else of floats
    Brgemm brgemm;
    int64_t B, Hq, Hkv, Sq, Sk, D, Dv;
    // Strides in elements; the last dim has stride 1.
    const void *q, *k, *v;
    int64_t q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s;
    const int32_t* bounds;  // [B or 1, Sq, 2]: visible keys [first, last)
    int64_t bounds_b;
    const float* bias;
    int64_t bias_b, bias_h, bias_q;
    const float *sinks, *alibi;  // [Hq]
    float scale, softcap;
    void* out;   // [B, Sq, Hq, Dv]
    float* lse;  // [B, Hq, Sq]
    // The plan: query rows and keys of a tile, parts of the key range.
    int64_t rows, cols, parts;
    // Packed operands, one region for each batch row and KV head; see attention/cpu.h.
    uint32_t* packed;
    int64_t packed_stride;
    float* partial;  // parts > 1: [items][rows * group][Dv padded + 2]
    // Backward only.
    const void* grad;  // [B, Sq, Hq, Dv] with strides
    int64_t grad_b, grad_s, grad_h;
    float* delta;  // [B, Hq, Sq]
    float* dq_parts;
    void *dq, *dk, *dv;
    int64_t dq_b, dq_h, dq_s, dk_b, dk_h, dk_s, dv_b, dv_h, dv_s;
};

struct AttentionSizes {
    int64_t packed, partial, dq_part, scratch;  // packed, partial, dq_part: 4-byte units; scratch: bytes
};

// A chunk of logits [rows, V], contiguous; see cross_entropy/kernel.py.
struct CrossEntropy {
    Type type;
    void* z;  // overwritten by the gradient / scale, if wanted
    int64_t rows, V, item_rows;
    const int64_t* labels;
    const float* w;
    float scale, label_smoothing, z_loss, logit_scale, softcap;
    bool gradient;
    float *loss, *z_sum;  // [rows]
    float* dbias;         // [V]
};

// One parameter; decay = 1 - lr weight_decay, step_size = lr / (1 - beta1^t), rest = 1 - beta,
// square_scale = 1 / sqrt(1 - beta2^t).
struct AdamW {
    Type param_type, grad_type;
    void* param;
    const void* grad;
    float *exp_avg, *exp_avg_sq;
    void* shadow;  // bf16, or null
    float decay, step_size, square_scale, beta1, rest1, beta2, rest2, eps, grad_scale;
};

struct EmbeddingGradient {
    Type type, grad_type;         // of dweight and of grad
    const void* grad;             // [tokens, H]
    const int64_t *ids, *places;  // sorted, and the token of each
    int64_t tokens, rows, H, padding_idx, item_rows;
    float scale;
    void* dweight;  // [rows, H]
};

// Defined in the operators' cpu.h.
struct Norm;
struct Rotary;
struct Activation;
struct Program;
struct Step;
struct Instruction;
struct Matrix;
struct PanelProduct;
enum class PanelForm : int32_t;
struct Sampling;

struct Kernels {
    const char* level;
    int32_t width;  // floats in a vector

    uint64_t (*fingerprint)(const void* data, int64_t bytes);

    // Sizes of buffers for a shape and plan.
    AttentionSizes (*attention_sizes)(const Attention&, bool backward);
    // Items: B * Hkv. False if an operand holds a value that is not finite.
    bool (*attention_pack)(const Attention&, bool backward, int64_t item);
    // Items: B * Hkv * blocks of rows * parts. Without packed operands (few rows) they are read where they
    // lie.
    void (*attention_forward)(const Attention&, int64_t item, void* scratch);
    // Items: B * Hkv * blocks of rows; only if parts > 1.
    void (*attention_merge)(const Attention&, int64_t item);
    // Items: B * Hkv * parts.
    void (*attention_backward)(const Attention&, int64_t item, void* scratch);
    // Items: B * Hkv * blocks of rows.
    void (*attention_dq)(const Attention&, int64_t item);

    // Items: groups of item_rows rows. Scratch: V rounded up to columns, and one float for each column group.
    void (*cross_entropy)(const CrossEntropy&, int64_t item, float* scratch);
    // Items: groups of cross_entropy_columns columns.
    void (*cross_entropy_bias)(const CrossEntropy&, int64_t item);
    int64_t cross_entropy_columns;

    // Elements [first, first + count) of a parameter.
    void (*adamw)(const AdamW&, int64_t first, int64_t count);
    double (*sum_of_squares)(Type, const void*, int64_t first, int64_t count);

    // Items: groups of item_rows rows of the table.
    void (*embedding_backward)(const EmbeddingGradient&, int64_t item);

    // Norms: items of `rows` rows, with `norm_scratch` floats; sums: NORM_COLUMNS columns.
    void (*norm_forward)(const Norm&, int64_t item, float* scratch);
    void (*norm_backward)(const Norm&, int64_t item, float* scratch);
    void (*norm_sum)(const Norm&, int64_t item);
    // Items of `positions` positions of one batch row, with 3 R floats.
    void (*rotary)(const Rotary&, int64_t item, float* scratch);
    // Items of `rows` by `cols` elements.
    void (*activation)(const Activation&, int64_t item);
    void (*activation_backward)(const Activation&, int64_t item);
    void (*gated_activation)(const Activation&, int64_t item);
    void (*gated_activation_backward)(const Activation&, int64_t item);

    // Instructions of a decoder: how many units of work one is, the scratch that a thread needs, and a run of
    // units. Those of attention are apart.
    int64_t (*program_units)(const Program&, const Step&, const Instruction&);
    int64_t (*program_scratch)(const Program&, const Step&, const Instruction&);
    void (*program_run)(const Program&, const Step&, const Instruction&, int64_t first, int64_t count,
                        void* scratch);
    // Whether threads can take rows of their own through all products of a step.
    bool (*program_own_rows)(const Program&, const Step&);
    int64_t (*program_attention_units)(const Program&, const Step&, const Instruction&);
    int64_t (*program_attention_scratch)(const Program&, const Step&, const Instruction&);
    void (*program_attention_run)(const Program&, const Step&, const Instruction&, int64_t first,
                                  int64_t count, void* scratch);
    // Products with panels: how rows of x are prepared, bytes of all prepared rows and of one thread's
    // scratch, rows to prepare, panels to multiply when all rows are; one row of the matrix as K floats.
    PanelForm (*panel_form)(const PanelProduct&);
    int64_t (*panel_prepared_bytes)(const PanelProduct&);
    int64_t (*panel_scratch_bytes)(const PanelProduct&);
    void (*panel_prepare)(const PanelProduct&, int64_t first_row, int64_t rows);
    void (*panel_product)(const PanelProduct&, int64_t first_panel, int64_t panels, void* scratch);
    void (*panel_row)(const Matrix&, int64_t row, float* out);
    // One row of logits [V]; the scratch has sampling_scratch(V) floats.
    int64_t (*argmax)(const float* logits, int64_t V, float* scratch);
    void (*sample)(const Sampling&, float* scratch);
};

// Each operator's files put their functions into the table.
void fingerprint_kernels(Kernels& table);
void attention_forward_kernels(Kernels& table);
void attention_backward_kernels(Kernels& table);
void cross_entropy_kernels(Kernels& table);
void adamw_kernels(Kernels& table);
void embedding_kernels(Kernels& table);
void norm_forward_kernels(Kernels& table);
void norm_backward_kernels(Kernels& table);
void rotary_kernels(Kernels& table);
void activation_kernels(Kernels& table);
void gated_activation_kernels(Kernels& table);
void program_rows_kernels(Kernels& table);
void program_attention_kernels(Kernels& table);
void panel_kernels(Kernels& table);
void sampling_kernels(Kernels& table);

}  // namespace hasten

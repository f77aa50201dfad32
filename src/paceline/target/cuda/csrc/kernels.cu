// The kernels of a pass, for 1 to 64 rows, or for 2 to 4 groups of 64 (WITH_GROUPS): take and embed, then for each layer qkv,
// attend, combine, residual (output projection), gated, residual (down projection), and at last the logits and their tokens.
// A row's bits depend on its tokens and positions alone.
//
// Programmatic dependent launch chains them: a kernel starts while the one before is still running, fetches weights,
// then waits. A kernel may even start while the one two before it runs, so whatever the pass writes is read after the
// wait. The one exception is PassInput, which `take` writes: the first product lets its successor start only after its
// own wait, so everything from the first `attend` on may read it early.
//
// Defined when building: the tiles and the KB of shared memory of blocks that add to the residual stream, for up to 16,
// for 32 and for 64 rows (see graphs.py), WITH_INT8, WITHOUT_BF16; for packed weights PRODUCTS, such as
// PRODUCT(gated,Q4_K) PRODUCT(store,Q6_K), and the tiles of their blocks.

#ifdef ON_CPU
#include "cpu_shim.h"
#else
#include "ptx.h"
#endif
#include "attention.h"
#include "block_head.h"
#include "choose.h"
#include "linear.h"
#include "packed.h"
#include "rows.h"

#ifndef RESIDUAL_TILES
#define RESIDUAL_TILES 1
#define RESIDUAL_KB 110
#define RESIDUAL_TILES_32 1
#define RESIDUAL_KB_32 200
#define RESIDUAL_TILES_64 1
#endif
constexpr int LINEAR_TILES = 2, LINEAR_KB = 110;  // two blocks share a multiprocessor
constexpr int WIDE_TILES = 4, WIDE_KB = 200;      // one block to a multiprocessor

constexpr int blocks_per_sm(int row_tiles, int tiles) { return row_tiles * tiles <= 8 ? 2 : 1; }

#define LINEAR_KERNEL(NAME, ROW_TILES, TILES, KB, W, EPILOGUE)                              \
    KERNEL(THREADS, blocks_per_sm(ROW_TILES, TILES)) NAME(ARGUMENT(Linear) a) {              \
        LinearKernel<ROW_TILES, TILES, W, KB, EPILOGUE>(a).run();                            \
    }
#define LINEAR_KERNELS(ROW_TILES, TYPE, W, TILES, KB, LAST_TILES, LAST_KB)                            \
    LINEAR_KERNEL(qkv_##ROW_TILES##_##TYPE, ROW_TILES, TILES, KB, W, QkvEpilogue)                     \
    LINEAR_KERNEL(gated_##ROW_TILES##_##TYPE, ROW_TILES, TILES, KB, W, GatedEpilogue)                 \
    LINEAR_KERNEL(store_##ROW_TILES##_##TYPE, ROW_TILES, TILES, KB, W, StoreEpilogue)                 \
    LINEAR_KERNEL(residual_##ROW_TILES##_##TYPE, ROW_TILES, LAST_TILES, LAST_KB, W, ResidualEpilogue)
#define LINEAR_BUCKETS(TYPE, W, TILES_32)                                             \
    LINEAR_KERNELS(1, TYPE, W, LINEAR_TILES, LINEAR_KB, RESIDUAL_TILES, RESIDUAL_KB)  \
    LINEAR_KERNELS(2, TYPE, W, LINEAR_TILES, LINEAR_KB, RESIDUAL_TILES, RESIDUAL_KB)  \
    LINEAR_KERNELS(4, TYPE, W, TILES_32, WIDE_KB, RESIDUAL_TILES_32, RESIDUAL_KB_32)  \
    LINEAR_KERNELS(8, TYPE, W, WIDE_TILES, WIDE_KB, RESIDUAL_TILES_64, WIDE_KB)

#ifdef WITH_GROUPS
#define GROUPS_KERNEL(NAME, TILES, KB, W, EPILOGUE)                                          \
    KERNEL(THREADS, 1) NAME(ARGUMENT(Linear) a) {                                            \
        run_groups<LinearKernel<8, TILES, W, KB, EPILOGUE>>(a);                              \
    }
#define LINEAR_GROUPS(TYPE, W)                                                               \
    GROUPS_KERNEL(qkv_groups_##TYPE, WIDE_TILES, WIDE_KB, W, QkvEpilogue)                    \
    GROUPS_KERNEL(gated_groups_##TYPE, WIDE_TILES, WIDE_KB, W, GatedEpilogue)                \
    GROUPS_KERNEL(store_groups_##TYPE, WIDE_TILES, WIDE_KB, W, StoreEpilogue)                \
    GROUPS_KERNEL(residual_groups_##TYPE, RESIDUAL_TILES_64, WIDE_KB, W, ResidualEpilogue)
KERNEL(THREADS, 1) qkv_sums(ARGUMENT(Linear) a) { finish_sums<QkvEpilogue>(a); }
KERNEL(THREADS, 1) gated_sums(ARGUMENT(Linear) a) { finish_sums<GatedEpilogue>(a); }
KERNEL(THREADS, 1) residual_sums(ARGUMENT(Linear) a) { finish_sums<ResidualEpilogue>(a); }
#else
#define LINEAR_GROUPS(TYPE, W)
#endif

#ifndef WITHOUT_BF16
LINEAR_GROUPS(bf16, BF16)
LINEAR_BUCKETS(bf16, BF16, LINEAR_TILES)
LINEAR_KERNEL(store_rows_1_bf16, 1, LINEAR_TILES, LINEAR_KB, BF16, StoreRowsEpilogue)
LINEAR_KERNEL(store_rows_2_bf16, 2, LINEAR_TILES, LINEAR_KB, BF16, StoreRowsEpilogue)
LINEAR_KERNEL(store_rows_4_bf16, 4, LINEAR_TILES, WIDE_KB, BF16, StoreRowsEpilogue)
LINEAR_KERNEL(store_rows_8_bf16, 8, WIDE_TILES, WIDE_KB, BF16, StoreRowsEpilogue)
#endif
#ifdef WITH_INT8
LINEAR_GROUPS(int8, INT8)
LINEAR_BUCKETS(int8, INT8, WIDE_TILES)
#endif

#ifdef PRODUCTS
#define PACKED_KERNEL(NAME, ROW_TILES, TILES, KB, TYPE, EPILOGUE)                            \
    KERNEL(THREADS, KB > LINEAR_KB ? 1 : 2) NAME##_##ROW_TILES##_##TYPE(ARGUMENT(Linear) a) { \
        LinearKernel<ROW_TILES, TILES, TYPE, KB, EPILOGUE>(a).run();                         \
    }
#ifdef WITH_GROUPS
#define PACKED_GROUPS(NAME, TYPE, EPILOGUE, TILES) GROUPS_KERNEL(NAME##_groups_##TYPE, TILES, WIDE_KB, TYPE, EPILOGUE)
#else
#define PACKED_GROUPS(NAME, TYPE, EPILOGUE, TILES)
#endif
#define PACKED_BUCKETS(NAME, TYPE, EPILOGUE, TILES, KB, MANY_TILES)      \
    PACKED_GROUPS(NAME, TYPE, EPILOGUE, MANY_TILES)                      \
    PACKED_KERNEL(NAME, 1, TILES, KB, TYPE, EPILOGUE)                    \
    PACKED_KERNEL(NAME, 2, TILES, KB, TYPE, EPILOGUE)                    \
    PACKED_KERNEL(NAME, 4, MANY_TILES, WIDE_KB, TYPE, EPILOGUE)          \
    PACKED_KERNEL(NAME, 8, MANY_TILES, WIDE_KB, TYPE, EPILOGUE)
#define PRODUCT_qkv(TYPE) PACKED_BUCKETS(qkv, TYPE, QkvEpilogue, PACKED_QKV_TILES, LINEAR_KB, WIDE_TILES)
#define PRODUCT_gated(TYPE) PACKED_BUCKETS(gated, TYPE, GatedEpilogue, PACKED_GATED_TILES, LINEAR_KB, WIDE_TILES)
#define PRODUCT_store(TYPE) PACKED_BUCKETS(store, TYPE, StoreEpilogue, WIDE_TILES, LINEAR_KB, WIDE_TILES)
#define PRODUCT_residual(TYPE) \
    PACKED_BUCKETS(residual, TYPE, ResidualEpilogue, PACKED_RESIDUAL_TILES, PACKED_RESIDUAL_KB, PACKED_RESIDUAL_TILES)
#define PRODUCT(NAME, TYPE) PRODUCT_##NAME(TYPE)
PRODUCTS
#endif

#define ATTENTION_KERNELS(D)                                                              \
    KERNEL(THREADS, 128 / D) attend_##D(ARGUMENT(Attention) a) {                          \
        let_next_kernel_start();                                                          \
        AttendKernel<D>(a, a).run();                                                      \
    }                                                                                     \
    KERNEL(THREADS, 128 / D) block_attend_##D(ARGUMENT(BlockAttention) a) {                \
        let_next_kernel_start();                                                          \
        AttendKernel<D, BlockKeys<D>, BlockAttention>(a, a.attention).run();              \
    }                                                                                     \
    KERNEL(128, 4) block_heads_##D(ARGUMENT(BlockHeads) a) { normalise_block_head<D>(a); }   \
    KERNEL(128, 4) context_keys_##D(ARGUMENT(ContextKeys) a) { store_context<D>(a); }        \
    KERNEL(128, 4) combine_##D(ARGUMENT(Attention) a) { CombineKernel<D>::run(a); }          \
    KERNEL(128, 4) head_norm_##D(ARGUMENT(HeadNorm) a) { normalise_head<D>(a); }
ATTENTION_KERNELS(64)
ATTENTION_KERNELS(128)

KERNEL(THREADS, 1) take(ARGUMENT(TakeInput) a) { take_input(a); }
KERNEL(THREADS, 1) embed(ARGUMENT(Embed) a) { embed_row(a); }
KERNEL(THREADS, 1) take_block(ARGUMENT(TakeDraft) a) { take_draft(a); }
KERNEL(THREADS, 1) taps(ARGUMENT(GatherTaps) a) { gather_taps(a); }
KERNEL(THREADS, 1) embed_slots(ARGUMENT(EmbedBlock) a) { embed_block(a); }
KERNEL(THREADS, 1) sure(ARGUMENT(BlockSure) a) { block_sure(a); }
KERNEL(THREADS, 1) chain(ARGUMENT(ChainStep) a) { ChainStepKernel(a).run(); }
KERNEL(THREADS, 1) masks(ARGUMENT(Choose) a) { take_masks(a); }
KERNEL(THREADS, 1) process(ARGUMENT(Choose) a) { process_logits(a); }
KERNEL(THREADS, 1) top(ARGUMENT(Choose) a) { find_top(a); }
KERNEL(THREADS, 1) count(ARGUMENT(Choose) a) { count_depths(a); }
KERNEL(THREADS, 1) gather(ARGUMENT(Choose) a) { gather_candidates(a); }
KERNEL(THREADS, 1) choose(ARGUMENT(Choose) a) { choose_tokens(a); }
KERNEL(THREADS, 1) move(ARGUMENT(MoveRows) a) { move_rows(a); }
KERNEL(THREADS, 1) spoken(ARGUMENT(CountTokens) a) { count_tokens(a); }

#ifdef ON_CPU  // so that arguments.py can be checked
extern "C" int size_of(int which) {
    const int sizes[] = {sizeof(PassInput), sizeof(Linear),   sizeof(Attention), sizeof(HeadNorm),
                         sizeof(TakeInput), sizeof(Embed),    sizeof(MoveRows),  sizeof(Choose),
                         sizeof(Chosen),    sizeof(HostMasks), sizeof(CountTokens),
                         sizeof(DraftInput), sizeof(DraftResult), sizeof(TakeDraft), sizeof(GatherTaps), sizeof(ContextKeys),
                         sizeof(EmbedBlock), sizeof(BlockHeads), sizeof(BlockAttention), sizeof(BlockSure), sizeof(ChainStep)};
    return sizes[which];
}
#endif

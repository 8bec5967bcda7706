// Faults inside llama-server: a library that is preloaded, and changes what llama.cpp does.
//
// LLAMA_FAULT names the fault, LLAMA_VOCAB the number of logits of a row.  llama_process has
// pointers alone as arguments, and they are passed on as they came.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SEQUENCES 4
#define BLOCK 32

typedef bool (*remove_fn)(void *memory, int32_t sequence, int32_t first, int32_t last);
typedef int32_t (*position_fn)(void *memory, int32_t sequence);
typedef void *(*memory_fn)(const void *context);
typedef long (*process_fn)(void *, void *, void *, void *, void *, void *);
typedef float *(*logits_fn)(void *context, int32_t row);

static bool is(const char *name) {
    const char *chosen = getenv("LLAMA_FAULT");
    return chosen != NULL && strcmp(chosen, name) == 0;
}

// A reused prefix loses a cell: what is kept of a sequence lacks its last but one token.
bool llama_memory_seq_rm(void *memory, int32_t sequence, int32_t first, int32_t last) {
    remove_fn next = (remove_fn)dlsym(RTLD_NEXT, "llama_memory_seq_rm");
    bool done = next(memory, sequence, first, last);
    if (is("lost_cell") && last < 0 && first > BLOCK) next(memory, sequence, first - 2, first - 1);
    return done;
}

static int32_t rows, rows_before;

// At each multiple of a block the cell before the last one is lost.
long llama_process(void *context, void *b, void *c, void *d, void *e, void *f) {
    process_fn next = (process_fn)dlsym(RTLD_NEXT, "llama_process");
    long code = next(context, b, c, d, e, f);
    rows_before = rows;
    rows = 0;
    if (is("lost_block_end")) {
        void *memory = ((memory_fn)dlsym(RTLD_NEXT, "llama_get_memory"))(context);
        position_fn last = (position_fn)dlsym(RTLD_NEXT, "llama_memory_seq_pos_max");
        remove_fn drop = (remove_fn)dlsym(RTLD_NEXT, "llama_memory_seq_rm");
        for (int32_t s = 0; s < SEQUENCES; s++) {
            int32_t at = last(memory, s);
            if (at % BLOCK == BLOCK - 1) drop(memory, s, at - 1, at);
        }
    }
    return code;
}

// Where the step before had several sequences, logits are scaled.
float *llama_get_logits_ith(void *context, int32_t row) {
    float *logits = ((logits_fn)dlsym(RTLD_NEXT, "llama_get_logits_ith"))(context, row);
    static float *last = NULL;
    bool new_row = rows == 0 || logits != last;
    last = logits;
    if (logits == NULL || !new_row) return logits;
    rows++;
    if (is("batch") && rows_before > 1)
        for (int i = 0; i < atoi(getenv("LLAMA_VOCAB")); i++) logits[i] *= 0.95f;
    return logits;
}

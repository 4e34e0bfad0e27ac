/* Counts what a process has allocated: preload it. Two counters, each with its peak.
 *
 * "all": bytes that malloc and its kin have handed out (what is usable, so with rounding).
 * "aligned": bytes that were asked for with an alignment. onnxruntime allocates tensors and packed
 * weights so, numpy and Python nothing.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stddef.h>
#include <stdint.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

typedef struct { int64_t now, peak; } counter;
static counter all, aligned;

static void count(counter *c, int64_t bytes) {
    int64_t now = __atomic_add_fetch(&c->now, bytes, __ATOMIC_RELAXED), peak = c->peak;
    while (now > peak && !__atomic_compare_exchange_n(&c->peak, &peak, now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

/* Aligned allocations by address: open addressing, deletion moves what follows. */
enum { SLOTS = 1 << 18 };
static struct { void *at; int64_t bytes; } table[SLOTS];
static char busy;

static size_t slot_of(void *at) { return ((uintptr_t)at >> 4) * 11400714819323198485ull >> 46; }
static size_t next(size_t slot) { return (slot + 1) & (SLOTS - 1); }
static void lock(void) { while (__atomic_test_and_set(&busy, __ATOMIC_ACQUIRE)) ; }
static void unlock(void) { __atomic_clear(&busy, __ATOMIC_RELEASE); }

static void remember(void *at, int64_t bytes) {
    lock();
    size_t slot = slot_of(at);
    while (table[slot].at)
        slot = next(slot);
    table[slot].at = at, table[slot].bytes = bytes;
    count(&aligned, bytes);
    unlock();
}

static void forget(void *at) {
    lock();
    size_t hole = slot_of(at);
    while (table[hole].at && table[hole].at != at)
        hole = next(hole);
    if (table[hole].at) {
        count(&aligned, -table[hole].bytes);
        for (size_t slot = next(hole); table[slot].at; slot = next(slot)) {
            size_t home = slot_of(table[slot].at);
            if (((slot - home) & (SLOTS - 1)) >= ((slot - hole) & (SLOTS - 1)))
                table[hole] = table[slot], hole = slot;
        }
        table[hole].at = 0;
    }
    unlock();
}

static void *taken(void *at) {
    if (at)
        count(&all, malloc_usable_size(at));
    return at;
}

static void *taken_aligned(size_t alignment, size_t bytes) {
    void *at = taken(__libc_memalign(alignment, bytes));
    if (at)
        remember(at, bytes);
    return at;
}

void *malloc(size_t bytes) { return taken(__libc_malloc(bytes)); }
void *calloc(size_t number, size_t bytes) { return taken(__libc_calloc(number, bytes)); }
void *memalign(size_t alignment, size_t bytes) { return taken_aligned(alignment, bytes); }
void *aligned_alloc(size_t alignment, size_t bytes) { return taken_aligned(alignment, bytes); }

int posix_memalign(void **to, size_t alignment, size_t bytes) {
    void *at = taken_aligned(alignment, bytes);
    if (at)
        *to = at;
    return at ? 0 : ENOMEM;
}

void free(void *at) {
    if (!at)
        return;
    count(&all, -(int64_t)malloc_usable_size(at));
    forget(at);
    __libc_free(at);
}

void *realloc(void *at, size_t bytes) {
    int64_t before = at ? malloc_usable_size(at) : 0;
    if (at)
        forget(at);
    void *moved = __libc_realloc(at, bytes);
    if (moved || !bytes)
        count(&all, (moved ? (int64_t)malloc_usable_size(moved) : 0) - before);
    return moved;
}

/* Forget earlier peaks. */
void allocations_restart(void) { all.peak = all.now, aligned.peak = aligned.now; }

/* all, its peak, aligned, its peak. */
void allocations_read(int64_t to[4]) { to[0] = all.now, to[1] = all.peak, to[2] = aligned.now, to[3] = aligned.peak; }

// Runs grids: block after block, the threads of a block as fibres on one system thread.
//
// A fibre runs until it comes to a barrier or a warp operation, or ends; when none can run, those that all have arrived go on.
// If then nobody can, the block is divergent, which is an error here (a card may hang or go on with garbage). Under
// ThreadSanitizer fibres are announced as threads that only barriers order, and each block gets a system thread: whatever two
// threads of a grid do to one place without a barrier between them is a race, although in truth they take turns.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "emulation.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef EMULATION_THREADS
#include <sanitizer/tsan_interface.h>
#include <sys/mman.h>

#include <thread>
#endif

#if defined(__x86_64__) && !defined(EMULATION_UCONTEXT)
// Keep what a function must keep, swap stacks, take it back: a hundredth of swapcontext, which makes system calls.
asm(R"(
.text
.p2align 4
.type emulation_switch, @function
emulation_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulation_switch, .-emulation_switch
)");
struct Context {
    void* top;
};
extern "C" void emulation_switch(Context* from, Context* to);
static void prepare(Context* context, char* stack, size_t size, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + size) - 3;  // entry finds the stack as after a call
    *--top = reinterpret_cast<void*>(entry);
    top -= 6;
    context->top = top;
}
#else
#include <ucontext.h>
using Context = ucontext_t;
static void emulation_switch(Context* from, Context* to) { swapcontext(from, to); }
static void prepare(Context* context, char* stack, size_t size, void (*entry)()) {
    getcontext(context);
    context->uc_stack.ss_sp = stack;
    context->uc_stack.ss_size = size;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
}
#endif

namespace emulation {

Place* here;

namespace {

constexpr size_t STACK = 256 * 1024;
constexpr unsigned WARP = 32;

enum class State { READY, AT_BARRIER, AT_WARP, DONE };

struct Fibre : Place {
    State state;
    char* stack = nullptr;
    Context context;
    const char* file;
    int line, vote;
    unsigned mask, source;
    unsigned long long sent, received;
#ifdef EMULATION_THREADS
    void* announced = nullptr;
#endif
};

struct Grid {
    Body body;
    void** arguments;
    Index size, block_size;
    size_t shared;
    unsigned order;  // 0: threads in their order, 1: backwards, else: shuffled by this seed
};

std::map<std::string, Body>& kernels() {
    static std::map<std::string, Body> known;
    return known;
}

std::mutex one_grid;
std::vector<Fibre> fibres;
std::vector<char*> free_stacks;
Context scheduler;
const Grid* grid;
std::string failure;

#ifdef EMULATION_THREADS
// Two of each, in turn: who is first through a barrier must not be seen at the next one by who is still to leave the last.
char block_order[2], warp_order[WARP][2];
unsigned block_turn, warp_turn[WARP];
char grid_order;  // the host, and so the next grid, sees what all threads did; another block does not
void* announced_scheduler;

// The sanitizer gives a fibre the number of one that is gone and takes both for one, so they stay for some blocks.
constexpr size_t REMEMBERED = 8 * 256;
std::deque<void*> finished;

// Memory that the sanitizer forgets when it is given back: other fibres will have it, and nothing orders them.
char* take(size_t size) {
    return static_cast<char*>(mmap(nullptr, size + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
}
void give_back(void* room, size_t size) { munmap(room, size + 1); }
#else
char* take(size_t size) { return static_cast<char*>(aligned_alloc(16, (size + 15) / 16 * 16)); }
void give_back(void* room, size_t) { free(room); }
#endif

#if defined(__SANITIZE_ADDRESS__)
const void* scheduler_stack;
size_t scheduler_size;
#endif

Fibre& me() { return *static_cast<Fibre*>(here); }

void leave(bool for_good) {
    Fibre& fibre = me();
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fake, scheduler_stack, scheduler_size);
#endif
    (void)for_good;
#ifdef EMULATION_THREADS
    __tsan_switch_to_fiber(announced_scheduler, __tsan_switch_to_fiber_no_sync);
#endif
    emulation_switch(&fibre.context, &scheduler);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, &scheduler_stack, &scheduler_size);
#endif
}

void entry() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_size);
#endif
    grid->body(grid->arguments);
#ifdef EMULATION_THREADS
    __tsan_release(&grid_order);
#endif
    me().state = State::DONE;
    leave(true);
}

void end(Fibre& fibre) {
#ifdef EMULATION_THREADS
    give_back(fibre.stack, STACK);
    finished.push_back(fibre.announced);
    fibre.announced = nullptr;
    if (finished.size() > REMEMBERED) {
        __tsan_destroy_fiber(finished.front());
        finished.pop_front();
    }
#else
    free_stacks.push_back(fibre.stack);
#endif
    fibre.stack = nullptr;
}

void resume(Fibre& fibre) {
    if (fibre.stack == nullptr) {
        if (free_stacks.empty()) free_stacks.push_back(take(STACK));
        fibre.stack = free_stacks.back();
        free_stacks.pop_back();
        prepare(&fibre.context, fibre.stack, STACK, entry);
    }
    here = &fibre;
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, fibre.stack, STACK);
#endif
#ifdef EMULATION_THREADS
    if (fibre.announced == nullptr) fibre.announced = __tsan_create_fiber(0);
    __tsan_switch_to_fiber(fibre.announced, __tsan_switch_to_fiber_no_sync);
#endif
    emulation_switch(&scheduler, &fibre.context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
    if (fibre.state == State::DONE) end(fibre);
}

std::string place(const Fibre& fibre) {
    const char* name = strrchr(fibre.file, '/');
    return std::string(name ? name + 1 : fibre.file) + ":" + std::to_string(fibre.line);
}

// Let the block go on if all of it waits at one barrier.
bool release_block() {
    int vote = 0;
    for (const Fibre& fibre : fibres) {
        if (fibre.state != State::AT_BARRIER || fibre.line != fibres[0].line || strcmp(fibre.file, fibres[0].file)) return false;
        vote |= fibre.vote;
    }
    for (Fibre& fibre : fibres) fibre.state = State::READY, fibre.vote = vote;
#ifdef EMULATION_THREADS
    ++block_turn;
#endif
    return true;
}

// Let a warp go on if all lanes that one of them names wait at the same operation.
bool release_warp(unsigned first) {
    const unsigned lanes = std::min<unsigned>(WARP, fibres.size() - first);
    bool released = false;
    for (unsigned lane = 0; lane < lanes; ++lane) {
        const Fibre& asking = fibres[first + lane];
        if (asking.state != State::AT_WARP) continue;
        bool complete = asking.mask >> lane & 1;
        for (unsigned other = 0; other < WARP; ++other) {
            if (!(asking.mask >> other & 1)) continue;
            const Fibre* fibre = other < lanes ? &fibres[first + other] : nullptr;
            complete &= fibre && fibre->state == State::AT_WARP && fibre->mask == asking.mask && fibre->line == asking.line &&
                        !strcmp(fibre->file, asking.file);
        }
        if (!complete) continue;
        const unsigned mask = asking.mask;
        for (unsigned other = 0; other < lanes; ++other) {
            Fibre& fibre = fibres[first + other];
            if (!(mask >> other & 1)) continue;
            fibre.received = mask >> fibre.source & 1 ? fibres[first + fibre.source].sent : 0xA5A5A5A5A5A5A5A5ull;
            fibre.state = State::READY;
        }
#ifdef EMULATION_THREADS
        ++warp_turn[first / WARP];
#endif
        released = true;
    }
    return released;
}

void diverged(const Index& block) {
    std::map<std::string, int> where;
    for (const Fibre& fibre : fibres)
        ++where[fibre.state == State::DONE ? "the end" : (fibre.state == State::AT_WARP ? "warp operation " : "barrier ") + place(fibre)];
    failure = "divergent block " + std::to_string(block.x) + ":";
    for (const auto& entry : where) failure += " " + std::to_string(entry.second) + " threads at " + entry.first + ";";
    failure.pop_back();
}

void run_block(const Index& block) {
    // Exactly as much as the launch gives, so that AddressSanitizer sees the end of it. Of any content, as on a card.
    unsigned char* const shared = reinterpret_cast<unsigned char*>(take(grid->shared));
    memset(shared, 0xA5, grid->shared);
    fibres.resize(grid->block_size.x);
    std::vector<unsigned> order(fibres.size());
    for (unsigned thread = 0; thread < fibres.size(); ++thread) {
        static_cast<Place&>(fibres[thread]) = {{thread, 0, 0}, block, grid->block_size, grid->size, shared};
        fibres[thread].state = State::READY;
        order[thread] = grid->order == 1 ? fibres.size() - 1 - thread : thread;
    }
    std::mt19937 shuffler(grid->order);
#ifdef EMULATION_THREADS
    announced_scheduler = __tsan_get_current_fiber();
#endif
    size_t alive = fibres.size();
    while (alive > 0 && failure.empty()) {
        if (grid->order > 1) std::shuffle(order.begin(), order.end(), shuffler);
        for (unsigned thread : order) {
            if (fibres[thread].state != State::READY) continue;
            resume(fibres[thread]);
            alive -= fibres[thread].state == State::DONE;
        }
        if (alive == 0) break;
        bool released = release_block();
        for (unsigned first = 0; !released && first < fibres.size(); first += WARP) released |= release_warp(first) != 0;
        for (unsigned first = 0; released && first < fibres.size(); first += WARP) release_warp(first);
        if (!released) diverged(block);
    }
    for (Fibre& fibre : fibres)
        if (fibre.stack != nullptr) end(fibre);
    give_back(shared, grid->shared);
}

void wait(State state, const char* file, int line) {
    Fibre& fibre = me();
    fibre.state = state, fibre.file = file, fibre.line = line;
#ifdef EMULATION_THREADS
    char* const order = &block_order[block_turn % 2];
    if (state == State::AT_BARRIER) __tsan_release(order);
    leave(false);
    if (state == State::AT_BARRIER) __tsan_acquire(order);
#else
    leave(false);
#endif
}

}  // namespace

void barrier(const char* file, int line) { barrier_or(0, file, line); }

int barrier_or(int vote, const char* file, int line) {
    me().vote = vote != 0;
    wait(State::AT_BARRIER, file, line);
    return me().vote;
}

unsigned long long exchange(unsigned mask, unsigned long long sent, unsigned source, const char* file, int line) {
    me().mask = mask, me().sent = sent, me().source = source;
    wait(State::AT_WARP, file, line);
    return me().received;
}

void warp_barrier(unsigned mask, const char* file, int line) {
#ifdef EMULATION_THREADS
    const unsigned warp = me().thread.x / WARP;
    char* const order = &warp_order[warp][warp_turn[warp] % 2];
    __tsan_release(order);
    exchange(mask, 0, me().thread.x % WARP, file, line);
    __tsan_acquire(order);
#else
    exchange(mask, 0, me().thread.x % WARP, file, line);
#endif
}

Register::Register(const char* kernel, Body body) { kernels()[kernel] = body; }

}  // namespace emulation

// Run one kernel on the blocks from `first` up to `end` of one grid. Returns 0, or 1 with what went wrong in `error`.
extern "C" int emulation_run(const char* kernel, unsigned first, unsigned end, unsigned blocks, unsigned threads, size_t shared,
                             void** arguments, unsigned order, char* error, size_t size) {
    using namespace emulation;
    const std::lock_guard<std::mutex> lock(one_grid);
    const auto found = kernels().find(kernel);
    failure.clear();
    if (found == kernels().end()) failure = "there is no such kernel";
    const Grid now = {failure.empty() ? found->second : nullptr, arguments, {blocks, 1, 1}, {threads, 1, 1}, shared, order};
    grid = &now;
    for (unsigned block = first; block < end && failure.empty(); ++block) {
#ifdef EMULATION_THREADS
        std::thread(run_block, Index{block, 0, 0}).join();
#else
        run_block({block, 0, 0});
#endif
    }
#ifdef EMULATION_THREADS
    __tsan_acquire(&grid_order);
#endif
    snprintf(error, size, "%s", failure.c_str());
    return !failure.empty();
}

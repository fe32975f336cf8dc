// Threads that sleep between jobs, or another library's.
//
// Knows: how a job of a few phases, each a number of independent tasks, is shared among the caller and whatever workers
// wake up in time. Does not know: what a task computes.
//
// Beside torch, whose OpenMP workers spin for milliseconds after each of its operators, workers of our own wait for the
// core that those hold. There the caller names that OpenMP's entry, and its team takes the tasks (and is waited for).
//
// Nobody waits for a worker of our own that has not woken: tasks are taken from a counter, and the caller alone could finish them
// all. A phase begins when all tasks of the one before have ended. One job runs at a time, other callers queue: two
// memory-bound jobs side by side would only halve each other. Workers sleep in the kernel (futex by std::atomic::wait);
// within a job, the wait for a phase to end spins briefly, then yields. A forked child starts with no workers and makes
// its own.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

class Pool {
public:
    static constexpr int kMaxPhases = 4;
    using Task = void (*)(void* job, int phase, int64_t task, int slot);
    using OpenMp = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);  // GOMP_parallel

    static Pool& instance() {
        static Pool* pool = make();
        return *pool;
    }

    // Held from filling shared scratch to the end of run().
    std::mutex& gate() { return *busy_; }

    // Runs tasks[p] tasks of each phase on up to `threads` threads, the caller included: those of `openmp`, or our own
    // where that is null. Call with gate() held.
    void run(void* job, Task task, int phases, const int64_t* tasks, int threads, OpenMp openmp) {
        int64_t most = 0;
        for (int p = 0; p < phases; p++) most = tasks[p] > most ? tasks[p] : most;
        int helpers = (int)(most < threads ? most : threads) - 1;
        if (forked_) openmp = nullptr;
        if (helpers > 0 && !openmp) grow(helpers);
        job_ = job;
        task_ = task;
        phases_ = phases;
        helpers_ = helpers;
        for (int p = 0; p < phases; p++) {
            tasks_[p] = tasks[p];
            next_[p].store(0, std::memory_order_relaxed);
            done_[p].store(0, std::memory_order_relaxed);
        }
        if (helpers > 0 && openmp) {  // always as many threads as its other callers want: it would end and make threads
            next_slot_.store(0, std::memory_order_relaxed);
            openmp([](void* pool) { ((Pool*)pool)->work(((Pool*)pool)->next_slot_.fetch_add(1)); }, this, threads, 0);
            return;
        }
        if (helpers > 0) {
            inside_.store(0, std::memory_order_release);  // opens the door
            epoch_.fetch_add(1, std::memory_order_release);
            epoch_.notify_all();
        }
        work(0);
        if (helpers > 0) {
            uint32_t inside = inside_.fetch_or(kClosed, std::memory_order_acq_rel) & ~kClosed;
            for (int spins = 0; inside; inside = inside_.load(std::memory_order_acquire) & ~kClosed) relax(spins++);
        }
    }

private:
    static constexpr uint32_t kClosed = 1u << 31;

    static Pool* make() {
        pthread_atfork(nullptr, nullptr, [] { instance().forget(); });
        return new Pool;  // never destroyed: workers may outlive main
    }

    // In a forked child: the workers and whoever held the mutex are in the parent. OpenMP's are too, which waits for them
    // forever.
    void forget() {
        forked_ = true;
        busy_ = new std::mutex;
        workers_ = 0;
        inside_.store(kClosed);
    }

    void grow(int wanted) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of the program, not for these
        for (; workers_ < wanted; workers_++) std::thread(&Pool::serve, this, workers_).detach();
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void serve(int index) {
        uint32_t seen = 0;
        for (;;) {
            if (index < helpers_.load(std::memory_order_acquire) && enter()) {
                work(index + 1);
                inside_.fetch_sub(1, std::memory_order_acq_rel);
            }
            uint32_t now = epoch_.load(std::memory_order_acquire);
            if (now == seen) epoch_.wait(seen, std::memory_order_acquire);
            seen = now;
        }
    }

    bool enter() {
        uint32_t inside = inside_.load(std::memory_order_acquire);
        while (!(inside & kClosed))
            if (inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel)) return true;
        return false;
    }

    void work(int slot) {
        for (int p = 0; p < phases_; p++) {
            const int64_t tasks = tasks_[p];
            int64_t finished = 0;
            for (;;) {
                int64_t task = next_[p].fetch_add(1, std::memory_order_relaxed);
                if (task >= tasks) break;
                task_(job_, p, task, slot);
                finished++;
            }
            if (finished) done_[p].fetch_add(finished, std::memory_order_acq_rel);
            for (int spins = 0; done_[p].load(std::memory_order_acquire) < tasks; spins++) relax(spins);
        }
    }

    static void relax(int spins) {
        if (spins > 4000) {  // some ten microseconds: the other thread has lost its core
            sched_yield();
            return;
        }
#if defined(__x86_64__)
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    std::mutex* busy_ = new std::mutex;
    int workers_ = 0;
    bool forked_ = false;
    std::atomic<int> next_slot_{0};  // of an OpenMP team
    std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<uint32_t> inside_{kClosed};
    std::atomic<int> helpers_{0};
    void* job_ = nullptr;
    Task task_ = nullptr;
    int phases_ = 0;
    int64_t tasks_[kMaxPhases] = {};
    struct alignas(64) Counter : std::atomic<int64_t> {};
    Counter next_[kMaxPhases], done_[kMaxPhases];
};

// Threads that sleep between jobs, or another library's.
//
// Knows: how a job of a few phases, each a number of independent tasks, is shared among the caller and whatever workers
// wake up in time. Does not know: what a task computes.
//
// Beside torch, whose OpenMP workers spin for milliseconds after each of its operators, workers of our own would wait for
// the core that those hold. There the caller names that OpenMP's entry, and while its workers spin its team takes the
// tasks. Asleep they are left so: an OpenMP team is waited for, and waking it can take longer than the job.
//
// Nobody waits for a worker of our own that has not woken: tasks are taken from a counter, and the caller alone could
// finish them all. They are kept off the caller's core, on which the system likes to wake them. A phase begins when all tasks of the one before have ended. One job runs at a time, other callers queue: two
// memory-bound jobs side by side would only halve each other. Workers sleep in the kernel (futex by std::atomic::wait);
// within a job, the wait for a phase to end spins briefly, then yields. A forked child starts with no workers and makes
// its own.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/syscall.h>
#endif
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
        if (openmp && (forked_ || !team().is_awake(threads))) openmp = nullptr;
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
            team_ = &team();
            caller_ = this_thread();
            openmp([](void* pool) { ((Pool*)pool)->work_in_team(); }, this, threads, 0);
            return;
        }
        if (helpers > 0) {
            steer();
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

    // What is known of the OpenMP team of one thread that calls it.
    class Team {
    public:
        // Whether its workers run now, as they do while they spin; true as well where nothing is known of them yet.
        bool is_awake(int threads) {
            if (threads_ == threads && worker_) {
                const int64_t before = ran(worker_);
                if (before >= 0) return ran(worker_) > before;
            }
            threads_ = threads;
            worker_ = 0;
            return true;
        }

        // One of its threads, `caller` is the one that waits for the others.
        void meet(int thread, int caller) {
            if (!worker_ && thread != caller) worker_ = thread;
        }

    private:
        // Nanoseconds that a thread has run, up to this moment; -1 = it is gone.
        static int64_t ran(int thread) {
            timespec time;
            const auto clock = (clockid_t)(~(unsigned)thread << 3 | 6);  // Linux' number for pthread_getcpuclockid's
            return clock_gettime(clock, &time) ? -1 : time.tv_sec * 1000000000LL + time.tv_nsec;
        }

        int threads_ = 0;
        std::atomic<int> worker_{0};
    };

    static Team& team() {
        static thread_local Team mine;
        return mine;
    }

    void work_in_team() {
        team_->meet(this_thread(), caller_);
        work(next_slot_.fetch_add(1));
    }

    static int this_thread() {
#if defined(__linux__)
        return (int)syscall(SYS_gettid);
#else
        return 0;
#endif
    }

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
        for (auto& thread : thread_) thread.store(0);
        inside_.store(kClosed);
    }

    void grow(int wanted) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of the program, not for these
        for (; workers_ < wanted; workers_++, avoided_ = -1) std::thread(&Pool::serve, this, workers_).detach();
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    // Keeps the workers off the caller's core: woken there, one would wait for the caller's slice to end (milliseconds).
    void steer() {
#if defined(__linux__)
        const int here = sched_getcpu();
        cpu_set_t others;
        if (here == avoided_ || here < 0 || sched_getaffinity(0, sizeof others, &others) != 0) return;
        CPU_CLR(here, &others);
        if (CPU_COUNT(&others) == 0) return;
        for (int i = 0; i < workers_ && i < kSteered; i++) {
            const int thread = thread_[i].load(std::memory_order_acquire);
            if (thread == 0) return;  // has not begun: next time
            sched_setaffinity(thread, sizeof others, &others);
        }
        avoided_ = here;
#endif
    }

    void serve(int index) {
        if (index < kSteered) thread_[index].store(this_thread(), std::memory_order_release);
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
    static constexpr int kSteered = 256;
    std::atomic<int> thread_[kSteered] = {};  // the workers' numbers in the system
    int avoided_ = -1;                        // the core that they are kept off
    bool forked_ = false;
    std::atomic<int> next_slot_{0};  // of an OpenMP team, as are the next two
    Team* team_ = nullptr;
    int caller_ = 0;
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

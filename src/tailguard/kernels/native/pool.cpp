#include "pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <sys/mman.h>
#endif

namespace tailguard {

namespace {

struct Batch {
    const std::function<void(int)> *task;
    int n_tasks;
    std::atomic<int> next{0};
    int left;  // tasks that have not ended; guarded by the mutex
    std::mutex mutex;
    std::condition_variable ended;
    std::exception_ptr error;

    // Runs tasks until none is left to begin
    void work() {
        for (int i; (i = next.fetch_add(1)) < n_tasks;) {
            std::exception_ptr raised;
            try {
                (*task)(i);
            } catch (...) {
                raised = std::current_exception();
            }
            std::lock_guard<std::mutex> lock(mutex);
            if (raised && !error) error = raised;
            if (--left == 0) ended.notify_all();
        }
    }
};

class Pool {
  public:
    void run(const std::shared_ptr<Batch> &batch, int n_helpers) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            for (; n_threads_ < n_helpers; ++n_threads_) {
                try {
                    std::thread([this] { serve(); }).detach();
                } catch (const std::system_error &) {
                    break;  // the system has no thread to give: those that are there do the work
                }
            }
            for (int i = 0; i < std::min(n_helpers, n_threads_); ++i) waiting_.push_back(batch);
        }
        wake_.notify_all();
        batch->work();
        std::unique_lock<std::mutex> lock(batch->mutex);
        batch->ended.wait(lock, [&] { return batch->left == 0; });
    }

    float *take(size_t &capacity) {
        {
            std::lock_guard<std::mutex> lock(memory_);
            const auto found = kept_.lower_bound(capacity);  // the smallest that is large enough, if not far too large
            if (found != kept_.end() && found->first <= 4 * capacity + 65536) {
                capacity = found->first;
                return kept_.extract(found).mapped();
            }
        }
        constexpr size_t huge = size_t(1) << 21;
        const size_t bytes = capacity * sizeof(float);
        void *at = nullptr;
        if (posix_memalign(&at, bytes >= huge ? huge : 64, bytes) != 0) throw std::bad_alloc();
#if defined(__linux__)
        if (bytes >= huge) madvise(at, bytes, MADV_HUGEPAGE);
#endif
        return static_cast<float *>(at);
    }

    void give_back(float *at, size_t capacity) {
        std::lock_guard<std::mutex> lock(memory_);
        kept_.emplace(capacity, at);
        if (kept_.size() <= MOST_KEPT) return;
        std::free(kept_.begin()->second);
        kept_.erase(kept_.begin());
    }

  private:
    static constexpr size_t MOST_KEPT = 32;

    [[noreturn]] void serve() {
        for (;;) {
            std::shared_ptr<Batch> batch;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return !waiting_.empty(); });
                batch = std::move(waiting_.front());
                waiting_.pop_front();
            }
            batch->work();
        }
    }

    std::mutex mutex_, memory_;
    std::condition_variable wake_;
    std::deque<std::shared_ptr<Batch>> waiting_;
    std::multimap<size_t, float *> kept_;
    int n_threads_ = 0;
};

std::atomic<Pool *> current{nullptr};

// Never destroyed: threads wait in it until the process ends. A forked child has none of them, and locks that may be
// held by threads it does not have; it begins with a pool of its own.
Pool &pool() {
    static std::once_flag once;
    std::call_once(once, [] {
        current = new Pool;
#if defined(__unix__) || defined(__APPLE__)
        pthread_atfork(nullptr, nullptr, [] { current = new Pool; });
#endif
    });
    return *current;
}

}  // namespace

void parallel(int n_tasks, int n_threads, const std::function<void(int)> &task) {
    if (n_tasks <= 1 || n_threads <= 1) {
        for (int i = 0; i < n_tasks; ++i) task(i);
        return;
    }
    auto batch = std::make_shared<Batch>();
    batch->task = &task;
    batch->n_tasks = batch->left = n_tasks;
    pool().run(batch, std::min(n_threads, n_tasks) - 1);
    if (batch->error) std::rethrow_exception(batch->error);
}

Buffer::Buffer(size_t count) : count_(count), capacity_(std::max<size_t>(count, 1)) { at_ = pool().take(capacity_); }

Buffer::~Buffer() {
    if (at_) pool().give_back(at_, capacity_);
}

Buffer &Buffer::operator=(Buffer &&other) noexcept {
    std::swap(at_, other.at_);
    std::swap(count_, other.count_);
    std::swap(capacity_, other.capacity_);
    return *this;
}

}  // namespace tailguard

// Threads of this process that wait for work without spinning, and memory that is used again.
#pragma once

#include <cstddef>
#include <cstring>
#include <functional>
#include <utility>

namespace tailguard {

// Calls task(0) .. task(n_tasks - 1) on at most n_threads threads, this one included, and returns when all have ended.
// May be called from several threads at once, and after a fork. The first exception of a task is raised here.
void parallel(int n_tasks, int n_threads, const std::function<void(int)> &task);

// Room for float32 numbers, not zeroed, given back to the process-wide store at the end of its life.
class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(size_t count);
    ~Buffer();
    Buffer(Buffer &&other) noexcept { *this = std::move(other); }
    Buffer &operator=(Buffer &&other) noexcept;
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    float *data() const { return at_; }
    void clear() { std::memset(at_, 0, sizeof(float) * count_); }

  private:
    float *at_ = nullptr;
    size_t count_ = 0, capacity_ = 0;
};

}  // namespace tailguard

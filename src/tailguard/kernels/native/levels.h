// Instruction sets that kernels are compiled for, and which of them this processor has.
#pragma once

#include <cstdlib>
#include <cstring>

namespace tailguard {

enum Level { baseline_level = 0, v3_level = 1, v4_level = 2 };

inline const char *level_name(Level level) {
#if defined(__x86_64__)
    constexpr const char *names[] = {"x86-64", "x86-64-v3", "x86-64-v4"};
    return names[level];
#elif defined(__aarch64__)
    return (void)level, "aarch64";
#else
    return (void)level, "baseline";
#endif
}

// The newest level that this processor has and that was compiled; TAILGUARD_LEVEL=0, 1, 2 asks for an older one.
inline Level best_level() {
    int level = baseline_level;
#if defined(__x86_64__) && N_LEVELS > 1
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
        level = v3_level;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512vl"))
            level = v4_level;
    }
    if (const char *asked = std::getenv("TAILGUARD_LEVEL"); asked && std::strlen(asked) == 1) {
        int most = asked[0] - '0';
        if (most >= 0 && most < level) level = most;
    }
#endif
    return static_cast<Level>(level);
}

}  // namespace tailguard

// Files compiled per instruction set define a constant `name` of type `Table` (of functions) in the namespace LEVEL.
// DECLARE_LEVELS makes them known at the top of another file, BEST_LEVEL is the one for this processor.
#if N_LEVELS > 1
#define DECLARE_LEVELS(Table, name)                                   \
    namespace tailguard::baseline { extern const Table name; }        \
    namespace tailguard::v3 { extern const Table name; }              \
    namespace tailguard::v4 { extern const Table name; }
#define BEST_LEVEL(name) (best_level() == v4_level ? v4::name : best_level() == v3_level ? v3::name : baseline::name)
#else
#define DECLARE_LEVELS(Table, name) \
    namespace tailguard::baseline { extern const Table name; }
#define BEST_LEVEL(name) baseline::name
#endif

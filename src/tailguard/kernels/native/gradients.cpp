// The gradient of a batch through trunks with their losses (kernels/networks.py).
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>

#include "trunk.h"

namespace tailguard {

namespace {

// The member of a job (kernels/jobs.py) with that name; empty where it is None
template <typename T>
T member(nb::handle job, const char *name) {
    const nb::object value = job.attr(name);
    T result{};
    if (!value.is_none() && !nb::try_cast<T>(value, result, false))
        throw std::invalid_argument(std::string(name) + " is not what it should be: an array has to be contiguous, of float32 or bool, and on the CPU.");
    return result;
}

// An array of a job, checked; without numbers where it is None and may be
template <typename T>
Array<T> array(nb::handle job, const char *name, std::initializer_list<int64_t> shape, bool optional = false) {
    Array<T> result = member<Array<T>>(job, name);
    if (!result.is_valid() && !optional) throw std::invalid_argument(std::string(name) + " is missing.");
    return result.is_valid() ? expect(result, name, shape) : result;
}

template <typename T>
T *numbers(const Array<T> &array) {
    return array.is_valid() ? array.data() : nullptr;
}

// What a trunk learns from: all sequences of a rollout
struct Job {
    int64_t end = 0;
    Layout layout;
    std::optional<Layout> risk_layout;
    int64_t n_steps = 0, n_sequences = 0, log_std_at = -1;
    ConstFloats weights, observations, hidden, cell, actions, log_probs, advantages, target, levels, risk,
        risk_observations, d_output, d_features;
    Floats gradient, d_x;
    ConstBools starts, valid;
    std::vector<int> n_choices;
    ShardTask task{};  // what all shards of all calls have in common

    explicit Job(nb::handle of) : layout(read_layout(of.attr("layout"), end)) {
        const int64_t layers = layout.n_layers, H = layout.n_units, W = layout.outputs();
        weights = array<const float>(of, "weights", {-1}), gradient = array<float>(of, "gradient", {int64_t(weights.shape(0))}, true);
        observations = array<const float>(of, "observations", {-1, -1, layout.n_inputs});
        const int64_t L = n_steps = observations.shape(0), S = n_sequences = observations.shape(1);
        starts = array<const bool>(of, "starts", {L, S});
        hidden = array<const float>(of, "hidden", {layers, S, H}), cell = array<const float>(of, "cell", {layers, S, H});
        const auto kind = nb::cast<std::string>(of.attr("kind"));
        if (kind != "outputs") valid = array<const bool>(of, "valid", {L, S});
        if (kind == "actor") {
            task.loss = actor_loss;
            actions = array<const float>(of, "actions", {L, S, -1});
            log_probs = array<const float>(of, "log_probs", {L, S}), advantages = array<const float>(of, "advantages", {L, S});
            log_std_at = member<int64_t>(of, "log_std_at"), n_choices = nb::cast<std::vector<int>>(of.attr("n_choices"));
            task.n_actions = int(actions.shape(2));
            int64_t total = log_std_at >= 0 ? task.n_actions : 0;
            for (int n : n_choices) total += n < 1 ? 1 << 30 : n;
            if (total != W || task.n_actions > 64 || (log_std_at < 0 && int(n_choices.size()) != task.n_actions))
                throw std::invalid_argument("outputs of an actor: one per action of a Gaussian, or those of n_choices; 1 to 64 actions.");
            if (log_std_at >= 0) end = std::max(end, log_std_at + task.n_actions), task.log_std = weights.data() + log_std_at;
        } else if (kind == "critic") {
            task.loss = critic_loss;
            target = array<const float>(of, "target", {L, S, -1}), levels = array<const float>(of, "levels", {W});
            task.n_samples = int(target.shape(2)), task.kappa = float(nb::cast<double>(of.attr("kappa")));
            if (task.n_samples < 1 || W > 4096)
                throw std::invalid_argument("a critic has at most 4096 quantiles and learns from at least one sample.");
            if (!of.attr("risk_layout").is_none()) read_risk(of);
        } else {
            task.loss = given_loss;
            d_output = array<const float>(of, "d_output", {L, S, W}), d_x = array<float>(of, "d_x", {L, S, layout.n_inputs}, true);
            d_features = array<const float>(of, "d_features", {L, S, layout.features()}, true);
        }
        if (L < 1 || int64_t(weights.shape(0)) < end)
            throw std::invalid_argument("weights: the layout needs " + std::to_string(end) + "; sequences have at least one step.");
        task.layout = &layout, task.n_steps = int(L), task.wants_gradient = gradient.is_valid();
        task.sequences = {observations.data(), bytes(starts), valid.is_valid() ? bytes(valid) : nullptr, hidden.data(), cell.data(), S};
        task.actions = numbers(actions), task.log_probs = numbers(log_probs), task.advantages = numbers(advantages);
        task.n_choices = n_choices.data(), task.target = numbers(target), task.levels = numbers(levels);
        task.d_output = numbers(d_output), task.d_features = numbers(d_features), task.d_x = numbers(d_x);
    }

    void read_risk(nb::handle of) {
        int64_t risk_end = 0;
        risk_layout = read_layout(of.attr("risk_layout"), risk_end), end = std::max(end, risk_end);
        risk = array<const float>(of, "risk", {n_steps, n_sequences, 3});
        risk_observations = array<const float>(of, "risk_observations", {n_steps, n_sequences, -1}, true);
        if (!risk_observations.is_valid()) risk_observations = observations;
        const int64_t inputs = layout.features() + int64_t(risk_observations.shape(2)) + 2;
        if (risk_layout->n_layers || risk_layout->n_inputs != inputs || risk_layout->outputs() != 1)
            throw std::invalid_argument("risk_layout: dense layers from " + std::to_string(inputs) + " inputs to 1 output, taught by `risk`.");
    }
};

// One job in one call of gradients()
struct Run {
    const Job &job;
    PackedWeights packed, risk_packed;
    Gradient sums[N_SHARDS], risk_sums[N_SHARDS];
    Buffer buffers[N_SHARDS], risk_buffers[N_SHARDS], workspaces[N_SHARDS];
    RiskTask risk[N_SHARDS];
    std::vector<double> d_log_std[N_SHARDS];
    ShardTask tasks[N_SHARDS];
    std::once_flag weights_packed;
    std::atomic<int> left{N_SHARDS};

    Run(const Job &of, nb::handle source, const ConstInts &chosen) : job(of) {
        const int64_t n = chosen.shape(0), share = (n + N_SHARDS - 1) / N_SHARDS;
        for (int i = 0; i < N_SHARDS; ++i) {
            ShardTask &task = tasks[i] = job.task;
            buffers[i] = allocate(sums[i], job.layout);
            task.packed = &packed.packed, task.gradient = sums[i];
            task.chosen = chosen.data() + std::min(i * share, n);
            task.n_chosen = std::min((i + 1) * share, n) - std::min(i * share, n);
            task.scale = nb::cast<double>(source.attr("scale"));
            if (task.loss == actor_loss) {
                task.clip_range = nb::cast<double>(source.attr("clip_range"));
                task.ent_coef = nb::cast<double>(source.attr("ent_coef"));
                task.kl_beta = nb::cast<double>(source.attr("kl_beta"));
                d_log_std[i].assign(task.n_actions, 0.0);
                task.d_log_std = d_log_std[i].data();
            }
            if (!job.risk_layout) continue;
            risk_buffers[i] = allocate(risk_sums[i], *job.risk_layout);
            risk[i] = {&*job.risk_layout, &risk_packed.packed, risk_sums[i], job.risk_observations.data(),
                       int(job.risk_observations.shape(2)), job.risk.data()};
            task.risk = &risk[i];
        }
    }

    void pack() {
        packed.load(job.layout, job.weights.data(), true);
        if (job.risk_layout) risk_packed.load(*job.risk_layout, job.weights.data(), true);
    }

    // Numbers that a shard's blocks need
    static size_t room(ShardTask &task) {
        Arena needed;
        Block block, beside;
        float *d_inputs;
        task.plan(task.size(), block, beside, d_inputs, needed);
        task.kept = task.pass == both_passes ? 0 : needed.used;
        return needed.used + (task.n_chosen - 1) / task.size() * task.kept;
    }

    void work(int shard) {
        std::call_once(weights_packed, [&] { pack(); });
        ShardTask &task = tasks[shard];
        if (task.n_chosen > 0) {
            if (task.pass != backward_pass) workspaces[shard] = Buffer(room(task));
            task.workspace = workspaces[shard].data();
        }
        if (task.pass == forward_pass) {
            if (task.n_chosen > 0) kernels().run_shard(task);
            return;
        }
        buffers[shard].clear();
        if (job.risk_layout) risk_buffers[shard].clear();
        if (task.n_chosen > 0) kernels().run_shard(task);
        workspaces[shard] = Buffer();
        if (left.fetch_sub(1) > 1 || !job.gradient.is_valid()) return;
        reduce(job.layout, sums[0], sums[1], job.gradient.data());
        if (job.risk_layout) reduce(*job.risk_layout, risk_sums[0], risk_sums[1], job.gradient.data());
        for (int a = 0; job.log_std_at >= 0 && a < task.n_actions; ++a)
            job.gradient.data()[job.log_std_at + a] = float(d_log_std[0][a] + d_log_std[1][a]);
    }

    std::vector<double> totals() const {
        const double *a = tasks[0].sums, *b = tasks[1].sums;
        if (job.task.loss != actor_loss) return {a[0] + b[0], a[1] + b[1]};
        return {a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] >= b[4] || a[4] != a[4] ? a[4] : b[4]};
    }
};

// A forward pass over all sequences of a job, kept until the gradients of its results are known
class Tape {
    Job job;
    ConstInts chosen;
    Run run;
    bool spent = false;

    void pass(Pass which, int n_threads) {
        for (ShardTask &task : run.tasks) task.pass = which;
        nb::gil_scoped_release released;
        parallel(N_SHARDS, n_threads, [&](int i) { run.work(i); });
    }

  public:
    Tape(nb::object source, const ConstInts &all, const Floats &output, const Floats &features, int n_threads)
        : job(source), chosen(expect(all, "chosen", {job.n_sequences})), run(job, source, chosen) {
        expect(output, "output", {job.n_steps, job.n_sequences, job.layout.outputs()});
        expect(features, "features", {job.n_steps, job.n_sequences, job.layout.features()});
        for (ShardTask &task : run.tasks) task.output = output.data(), task.features = features.data();
        pass(forward_pass, n_threads);
    }

    void backward(int n_threads) {
        if (spent) throw std::invalid_argument("the backward pass of a tape uses it up.");
        spent = true;
        pass(backward_pass, n_threads);
    }
};

std::vector<std::vector<double>> gradients(const std::vector<nb::object> &jobs, const ConstInts &chosen, int n_threads) {
    expect(chosen, "chosen", {-1});
    std::vector<std::unique_ptr<Run>> runs;
    for (const nb::object &source : jobs) {
        if (source.attr("kernel").is_none()) source.attr("kernel") = nb::cast(new Job(source), nb::rv_policy::take_ownership);
        const Job &job = *nb::cast<const Job *>(source.attr("kernel"));
        for (size_t i = 0; i < chosen.shape(0); ++i)
            if (chosen.data()[i] < 0 || chosen.data()[i] >= job.n_sequences)
                throw std::invalid_argument("chosen: sequence " + std::to_string(chosen.data()[i]) + " of " +
                                            std::to_string(job.n_sequences) + " does not exist.");
        runs.push_back(std::make_unique<Run>(job, source, chosen));
    }
    const int n_jobs = int(jobs.size());
    {
        nb::gil_scoped_release released;
        const bool apart = n_threads > 1;  // then the first shards of all jobs come first, and no thread waits for weights
        parallel(n_jobs * N_SHARDS, n_threads, [&](int i) {
            runs[apart ? i % n_jobs : i / N_SHARDS]->work(apart ? i / n_jobs : i % N_SHARDS);
        });
    }
    std::vector<std::vector<double>> sums;
    for (const auto &run : runs) sums.push_back(run->totals());
    return sums;
}

void quantile_huber(const ConstFloats &quantiles, const ConstFloats &samples, const ConstFloats &levels, float kappa,
                    const Floats &loss, const Floats &gradient, int n_threads) {
    const int64_t M = quantiles.ndim() == 2 ? quantiles.shape(0) : -1, Q = levels.ndim() == 1 ? levels.shape(0) : -1;
    expect(quantiles, "quantiles", {M, Q}), expect(samples, "samples", {M, -1}), expect(loss, "loss", {M});
    expect(gradient, "gradient", {M, Q});
    const int64_t K = samples.shape(1);
    if (Q > 4096 || K < 1) throw std::invalid_argument("quantile_huber: 1 to 4096 levels, at least one sample.");
    constexpr int64_t rows = 512;
    nb::gil_scoped_release released;
    parallel(int((M + rows - 1) / rows), n_threads, [&](int i) {
        const int64_t first = i * rows, some = std::min(rows, M - first);
        kernels().quantile_huber(quantiles.data() + first * Q, some, samples.data() + first * K, int(K), levels.data(),
                                 int(Q), kappa, loss.data() + first, gradient.data() + first * Q);
    });
}

}  // namespace

void bind_gradients(nb::module_ &module) {
    using nb::arg;
    nb::class_<Job>(module, "Job");  // made by gradients(), which keeps it in the job it is called with
    nb::class_<Tape>(module, "Tape")
        .def(nb::init<nb::object, const ConstInts &, const Floats &, const Floats &, int>(), arg("job"),
             arg("chosen").noconvert(), arg("output").noconvert(), arg("features").noconvert(), arg("n_threads"))
        .def("backward", &Tape::backward, arg("n_threads"));
    module.def("gradients", &gradients, arg("jobs"), arg("chosen").noconvert(), arg("n_threads"));
    module.def("quantile_huber", &quantile_huber, arg("quantiles").noconvert(), arg("samples").noconvert(),
               arg("levels").noconvert(), arg("kappa"), arg("loss").noconvert(), arg("gradient").noconvert(),
               arg("n_threads"));
}

}  // namespace tailguard

// The gradient of a batch through trunks with their losses (kernels/networks.py).
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <memory>

#include "trunk.h"

namespace tailguard {

namespace {

// What a trunk learns from: all sequences of a rollout
class Job {
  public:
    Job(nb::handle layout, ConstFloats weights, Floats gradient, ConstFloats observations, ConstBools starts,
        ConstFloats hidden, ConstFloats cell, ConstBools valid)
        : layout_(read_layout(layout, end_)), weights_(weights), gradient_(gradient), observations_(observations),
          starts_(starts), hidden_(hidden), cell_(cell), valid_(valid) {
        expect(weights_, "weights", {-1});
        expect(gradient_, "gradient", {int64_t(weights_.shape(0))});
        need_weights(end_);
        expect(observations_, "observations", {-1, -1, layout_.n_inputs});
        n_steps = observations_.shape(0), n_sequences = observations_.shape(1);
        if (n_steps < 1) throw std::invalid_argument("observations: sequences have at least one step.");
        expect(starts_, "starts", {n_steps, n_sequences}), expect(valid_, "valid", {n_steps, n_sequences});
        expect(hidden_, "hidden", {layout_.n_layers, n_sequences, layout_.n_units});
        expect(cell_, "cell", {layout_.n_layers, n_sequences, layout_.n_units});
    }
    virtual ~Job() = default;

    double scale = 1.0;
    int64_t n_steps, n_sequences;

    // One call of gradients()
    struct Run {
        const Job &job;
        PackedWeights packed;
        ShardGradients gradients;
        ShardTask tasks[N_SHARDS];
        std::atomic<int> left{N_SHARDS};
        PackedWeights risk_packed;
        std::optional<ShardGradients> risk_gradients;
        RiskTask risk[N_SHARDS];
        std::vector<double> d_log_std[N_SHARDS];

        Run(const Job &of, const int64_t *chosen, int64_t n_chosen) : job(of), gradients(of.layout_) {
            const int64_t share = (n_chosen + N_SHARDS - 1) / N_SHARDS;
            for (int i = 0; i < N_SHARDS; ++i) {
                const int64_t low = std::min(i * share, n_chosen), high = std::min((i + 1) * share, n_chosen);
                ShardTask &task = tasks[i];
                task = {};
                task.layout = &job.layout_, task.packed = &packed.packed, task.gradient = gradients.sums[i];
                task.sequences = {job.observations_.data(), bytes(job.starts_), bytes(job.valid_), job.hidden_.data(),
                                  job.cell_.data(), job.n_sequences};
                task.chosen = chosen + low, task.n_chosen = high - low, task.n_steps = int(job.n_steps);
                task.scale = job.scale;
            }
            job.prepare(*this);
        }

        void pack() {
            packed.load(job.layout_, job.weights_.data(), true);
            if (const Layout *layout = job.risk_layout()) risk_packed.load(*layout, job.weights_.data(), true);
        }

        void work(int shard) {
            ShardTask &task = tasks[shard];
            gradients.clear(shard);
            if (risk_gradients) risk_gradients->clear(shard);
            if (task.n_chosen > 0) {
                size_t size = block_size(job.layout_, task.n_steps, task.size(), true);
                if (job.risk_layout()) size += block_size(*job.risk_layout(), task.n_steps, task.size(), true);
                Buffer workspace(size);
                task.workspace = workspace.data();
                job.run(task);
            }
            if (left.fetch_sub(1) == 1) {
                gradients.reduce(job.layout_, job.gradient_.data());
                if (risk_gradients) risk_gradients->reduce(*job.risk_layout(), job.gradient_.data());
                job.finish(*this);
            }
        }
    };

    virtual std::vector<double> sums(const Run &run) const = 0;

  protected:
    void need_weights(int64_t end) const {
        if (int64_t(weights_.shape(0)) < end)
            throw std::invalid_argument("weights: the layout needs at least " + std::to_string(end) + " numbers.");
    }
    virtual const Layout *risk_layout() const { return nullptr; }
    virtual void prepare(Run &run) const = 0;
    virtual void run(ShardTask &task) const = 0;
    virtual void finish(const Run &) const {}

    int64_t end_ = 0;
    Layout layout_;
    ConstFloats weights_;
    Floats gradient_;
    ConstFloats observations_;
    ConstBools starts_;
    ConstFloats hidden_, cell_;
    ConstBools valid_;
};

class ActorJob : public Job {
  public:
    ActorJob(nb::handle layout, ConstFloats weights, Floats gradient, ConstFloats observations, ConstBools starts,
             ConstFloats hidden, ConstFloats cell, ConstBools valid, ConstFloats actions, ConstFloats log_probs,
             ConstFloats advantages, int64_t log_std_at, std::vector<int> n_choices)
        : Job(layout, weights, gradient, observations, starts, hidden, cell, valid), actions_(actions),
          log_probs_(log_probs), advantages_(advantages), log_std_at_(log_std_at), n_choices_(std::move(n_choices)) {
        expect(actions_, "actions", {n_steps, n_sequences, -1});
        expect(log_probs_, "log_probs", {n_steps, n_sequences}), expect(advantages_, "advantages", {n_steps, n_sequences});
        const int n_actions = int(actions_.shape(2));
        if (log_std_at_ >= 0) {
            need_weights(log_std_at_ + n_actions);
            if (layout_.outputs() != n_actions || n_actions > 64)
                throw std::invalid_argument("a Gaussian has one output per action dimension, at most 64.");
            return;
        }
        int64_t total = 0;
        for (int n : n_choices_) total += n < 1 ? 1 << 30 : n;
        if (int(n_choices_.size()) != n_actions || total != layout_.outputs())
            throw std::invalid_argument("n_choices: one number per action dimension, together as many as outputs.");
    }

    double clip_range = 0.2, ent_coef = 0.0, kl_beta = 0.0;

    std::vector<double> sums(const Run &run) const override {
        const double *a = run.tasks[0].sums, *b = run.tasks[1].sums;
        return {a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] >= b[4] || a[4] != a[4] ? a[4] : b[4]};
    }

  protected:
    void prepare(Run &run) const override {
        for (int i = 0; i < N_SHARDS; ++i) {
            ShardTask &task = run.tasks[i];
            task.actions = actions_.data(), task.log_probs = log_probs_.data(), task.advantages = advantages_.data();
            task.n_actions = int(actions_.shape(2)), task.n_choices = n_choices_.data();
            task.log_std = log_std_at_ >= 0 ? weights_.data() + log_std_at_ : nullptr;
            task.clip_range = clip_range, task.ent_coef = ent_coef, task.kl_beta = kl_beta;
            run.d_log_std[i].assign(task.n_actions, 0.0);
            task.d_log_std = run.d_log_std[i].data();
        }
    }
    void run(ShardTask &task) const override { kernels().actor_shard(task); }
    void finish(const Run &run) const override {
        for (size_t a = 0; log_std_at_ >= 0 && a < run.d_log_std[0].size(); ++a)
            gradient_.data()[log_std_at_ + a] = float(run.d_log_std[0][a] + run.d_log_std[1][a]);
    }

  private:
    ConstFloats actions_, log_probs_, advantages_;
    int64_t log_std_at_;
    std::vector<int> n_choices_;
};

class CriticJob : public Job {
  public:
    CriticJob(nb::handle layout, ConstFloats weights, Floats gradient, ConstFloats observations, ConstBools starts,
              ConstFloats hidden, ConstFloats cell, ConstBools valid, ConstFloats target, ConstFloats levels,
              float kappa, nb::handle risk_layout, MaybeConstFloats risk, MaybeConstFloats risk_observations)
        : Job(layout, weights, gradient, observations, starts, hidden, cell, valid), target_(target), levels_(levels),
          kappa_(kappa) {
        expect(target_, "target", {n_steps, n_sequences, -1}), expect(levels_, "levels", {layout_.outputs()});
        if (target_.shape(2) < 1) throw std::invalid_argument("target: at least one sample of the return per step.");
        if (layout_.outputs() > 4096) throw std::invalid_argument("a critic has at most 4096 quantiles.");
        if (risk_layout.is_none()) return;
        int64_t end = 0;
        risk_layout_ = read_layout(risk_layout, end);
        need_weights(end);
        if (!risk) throw std::invalid_argument("risk: a risk value needs its period features and targets.");
        risk_ = *risk;
        risk_observations_ = risk_observations ? *risk_observations : observations_;
        expect(risk_, "risk", {n_steps, n_sequences, 3});
        expect(risk_observations_, "risk_observations", {n_steps, n_sequences, -1});
        const int64_t inputs = layout_.features() + risk_observations_.shape(2) + 2;
        if (risk_layout_->n_layers || risk_layout_->n_inputs != inputs || risk_layout_->outputs() != 1)
            throw std::invalid_argument("risk_layout: dense layers from " + std::to_string(inputs) + " inputs to 1 output.");
    }

    std::vector<double> sums(const Run &run) const override {
        const double *a = run.tasks[0].sums, *b = run.tasks[1].sums;
        return {a[0] + b[0], a[1] + b[1]};
    }

  protected:
    const Layout *risk_layout() const override { return risk_layout_ ? &*risk_layout_ : nullptr; }
    void prepare(Run &run) const override {
        if (risk_layout_) run.risk_gradients.emplace(*risk_layout_);
        for (int i = 0; i < N_SHARDS; ++i) {
            ShardTask &task = run.tasks[i];
            task.target = target_.data(), task.n_samples = int(target_.shape(2));
            task.levels = levels_.data(), task.kappa = kappa_;
            if (!risk_layout_) continue;
            run.risk[i] = {&*risk_layout_, &run.risk_packed.packed, run.risk_gradients->sums[i],
                           risk_observations_.data(), int(risk_observations_.shape(2)), risk_.data()};
            task.risk = &run.risk[i];
        }
    }
    void run(ShardTask &task) const override { kernels().critic_shard(task); }

  private:
    ConstFloats target_, levels_;
    float kappa_;
    std::optional<Layout> risk_layout_;
    ConstFloats risk_, risk_observations_;
};

std::vector<std::vector<double>> gradients(const std::vector<const Job *> &jobs, const ConstInts &chosen, int n_threads) {
    expect(chosen, "chosen", {-1});
    const int64_t n_chosen = chosen.shape(0);
    std::vector<std::unique_ptr<Job::Run>> runs;
    for (const Job *job : jobs) {
        for (int64_t i = 0; i < n_chosen; ++i)
            if (chosen.data()[i] < 0 || chosen.data()[i] >= job->n_sequences)
                throw std::invalid_argument("chosen: sequence " + std::to_string(chosen.data()[i]) + " of " +
                                            std::to_string(job->n_sequences) + " does not exist.");
        runs.push_back(std::make_unique<Job::Run>(*job, chosen.data(), n_chosen));
    }
    const int n_jobs = int(jobs.size());
    {
        nb::gil_scoped_release released;
        parallel(n_jobs, n_threads, [&](int i) { runs[i]->pack(); });
        parallel(n_jobs * N_SHARDS, n_threads, [&](int i) { runs[i / N_SHARDS]->work(i % N_SHARDS); });
    }
    std::vector<std::vector<double>> sums;
    for (int i = 0; i < n_jobs; ++i) sums.push_back(jobs[i]->sums(*runs[i]));
    return sums;
}

}  // namespace

void bind_gradients(nb::module_ &module) {
    using nb::arg;
    nb::class_<Job>(module, "Job").def_rw("scale", &Job::scale);
    nb::class_<ActorJob, Job>(module, "ActorJob")
        .def(nb::init<nb::handle, ConstFloats, Floats, ConstFloats, ConstBools, ConstFloats, ConstFloats, ConstBools,
                      ConstFloats, ConstFloats, ConstFloats, int64_t, std::vector<int>>(),
             arg("layout"), arg("weights").noconvert(), arg("gradient").noconvert(), arg("observations").noconvert(),
             arg("starts").noconvert(), arg("hidden").noconvert(), arg("cell").noconvert(), arg("valid").noconvert(),
             arg("actions").noconvert(), arg("log_probs").noconvert(), arg("advantages").noconvert(), arg("log_std_at"),
             arg("n_choices"))
        .def_rw("clip_range", &ActorJob::clip_range)
        .def_rw("ent_coef", &ActorJob::ent_coef)
        .def_rw("kl_beta", &ActorJob::kl_beta);
    nb::class_<CriticJob, Job>(module, "CriticJob")
        .def(nb::init<nb::handle, ConstFloats, Floats, ConstFloats, ConstBools, ConstFloats, ConstFloats, ConstBools,
                      ConstFloats, ConstFloats, float, nb::handle, MaybeConstFloats, MaybeConstFloats>(),
             arg("layout"), arg("weights").noconvert(), arg("gradient").noconvert(), arg("observations").noconvert(),
             arg("starts").noconvert(), arg("hidden").noconvert(), arg("cell").noconvert(), arg("valid").noconvert(),
             arg("target").noconvert(), arg("levels").noconvert(), arg("kappa"), arg("risk_layout") = nb::none(),
             arg("risk").noconvert() = nb::none(), arg("risk_observations").noconvert() = nb::none());
    module.def("gradients", &gradients, arg("jobs"), arg("chosen").noconvert(), arg("n_threads"));
}

}  // namespace tailguard

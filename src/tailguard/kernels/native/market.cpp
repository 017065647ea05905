// The accounting of the trading environment (env/kernel.py): one pass over the accounts, nothing allocated.
//
// Every operation and its order are those of env/accounting.py, so that the two agree bit for bit. A step of a few
// environments takes less time than nanobind needs to unpack its twenty arrays, so they are read as buffers.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <type_traits>

namespace nb = nanobind;

namespace tailguard {

// A C-ordered numpy array that its caller keeps alive: (rows,), or (rows, columns) with all further axes as one.
template <typename T> struct View {
    T *data;
    size_t rows, columns;

    explicit View(nb::handle array) {
        Py_buffer buffer;
        const int wanted = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (std::is_const_v<T> ? 0 : PyBUF_WRITABLE);
        if (PyObject_GetBuffer(array.ptr(), &buffer, wanted)) throw nb::python_error();
        data = static_cast<T *>(buffer.buf);
        rows = buffer.ndim ? buffer.shape[0] : 0;
        columns = rows ? buffer.len / buffer.itemsize / rows : 0;
        using V = std::remove_const_t<T>;
        const char *kinds = std::is_same_v<V, bool> ? "?" : std::is_floating_point_v<V> ? "df" : "lq";
        const bool right = std::strchr(kinds, *buffer.format) && buffer.itemsize == sizeof(T);
        PyBuffer_Release(&buffer);
        if (!right) throw nb::type_error("An array has another type than this kernel works on.");
    }

    View(nb::handle array, size_t n_rows, size_t n_columns = 1) : View(array) {
        if (rows != n_rows || (rows && columns != n_columns))
            throw std::invalid_argument("An array has another shape than the arrays it belongs to.");
    }
};

struct Tape {  // (T, A) each
    const double *open, *mark, *sigma, *bar_value;
    const bool *fillable;
    size_t n_bars, n_assets;
};
struct Rates {
    double fee, adverse, impact, funding, borrow;
};
struct Limits {
    double lowest, gross_cap, band, ruin;
};
struct Accounts {
    int64_t *t, *steps;                                  // (N,)
    double *cash, *units, *entry;                        // (N,), (N, A), (N, A)
    double *equity, *costs, *turnover, *fees, *returns;  // (N,)
    size_t n_envs;

    Accounts(nb::tuple fields, size_t n_assets) {  // as env/kernel.py names them
        const View<int64_t> clock(fields[0]);
        n_envs = clock.rows, t = clock.data, steps = View<int64_t>(fields[1], n_envs).data;
        cash = View<double>(fields[2], n_envs).data;
        units = View<double>(fields[3], n_envs, n_assets).data;
        entry = View<double>(fields[4], n_envs, n_assets).data;
        equity = View<double>(fields[5], 4, n_envs).data;
        costs = equity + n_envs, turnover = costs + n_envs, fees = turnover + n_envs;
        returns = View<double>(fields[6], n_envs).data;
    }

    void expect_bars(size_t n_bars, size_t ahead) const {  // that the accounts' and so many more bars are there
        for (size_t n = 0; n < n_envs; ++n)
            if (t[n] < 0 || static_cast<size_t>(t[n]) + ahead >= n_bars)
                throw std::out_of_range("An account stands at a bar that the tape does not have.");
    }
};
struct Market {  // what one account's step needs beside the account
    Tape tape;
    Rates rates;
    Limits limits;

    Market(nb::tuple arrays, nb::tuple r, nb::tuple l)
        : rates{number(r[0]), number(r[1]), number(r[2]), number(r[3]), number(r[4])},
          limits{number(l[0]), number(l[1]), number(l[2]), number(l[3])} {
        const View<const double> mark(arrays[1]);
        const auto prices = [&](size_t i) { return View<const double>(arrays[i], mark.rows, mark.columns).data; };
        const bool *fillable = View<const bool>(arrays[2], mark.rows, mark.columns).data;
        tape = {prices(0), mark.data, prices(3), prices(4), fillable, mark.rows, mark.columns};
    }

    static double number(nb::handle value) { return nb::cast<double>(value); }
};

static double equity(double cash, const double *units, const double *mark, size_t n_assets) {
    for (size_t a = 0; a < n_assets; ++a) cash = cash + units[a] * mark[a];
    return cash;
}

static double bounded(double action, const Limits &limits) { return std::min(std::max(action, limits.lowest), 1.0); }

// Average price of one open position after a trade that is not zero.
static double average_entry(double entry, double before, double traded, double paid) {
    const double after = before + traded;
    if (after == 0.0) return 0.0;
    if (before * traded > 0.0) return (entry * before + paid * traded) / after;
    return before * after <= 0.0 ? paid : entry;
}

// Account n from the close of its bar t to the close of t + 1; the clock stays.
static void advance(const Accounts &accounts, size_t n, const double *action, const Market &market) {
    const auto &[tape, rates, limits] = market;
    const size_t A = tape.n_assets, now = accounts.t[n] * A, then = now + A;
    double *units = accounts.units + n * A, *entry = accounts.entry + n * A, money = accounts.cash[n];
    const double worth = equity(money, units, tape.mark + now, A);
    double gross = 0.0, costs = 0.0, fees = 0.0, traded_value = 0.0;
    for (size_t a = 0; a < A; ++a) gross = gross + std::abs(bounded(action[a], limits));
    const double scale = gross > limits.gross_cap ? limits.gross_cap / gross : 1.0;
    for (size_t a = 0; a < A; ++a) {
        const double weight = bounded(action[a], limits) * scale, held = units[a], mark = tape.mark[now + a];
        if (!(std::abs(weight - held * mark / worth) > limits.band) || !tape.fillable[then + a]) continue;
        const double traded = weight * worth / mark - held, size = std::abs(traded), price = tape.open[then + a];
        if (traded == 0.0) continue;
        const double participation = std::min(size * price / std::max(tape.bar_value[now + a], 1e-300), 1.0);
        const double adverse = rates.adverse + rates.impact * tape.sigma[now + a] * std::sqrt(participation);
        const double paid = price * (1.0 + (traded > 0.0 ? adverse : -adverse)), fee = rates.fee * size * paid;
        money = money - traded * paid - fee;
        entry[a] = average_entry(entry[a], held, traded, paid);
        units[a] = held + traded;
        costs = costs + (size * price * adverse + fee);
        fees = fees + fee;
        traded_value = traded_value + size * price;
    }
    double absolute = 0.0, borrowed = 0.0;
    for (size_t a = 0; a < A; ++a) {
        const double notional = units[a] * tape.mark[then + a];
        absolute = absolute + std::abs(notional);
        borrowed = borrowed + std::max(-notional, 0.0);
    }
    const double holding = rates.funding * absolute + rates.borrow * (borrowed + std::max(-money, 0.0));
    accounts.cash[n] = money - holding;
    accounts.equity[n] = equity(accounts.cash[n], units, tape.mark + then, A);
    accounts.costs[n] = costs + holding;
    accounts.turnover[n] = traded_value / worth;
    accounts.fees[n] = fees;
}

static size_t close_bar(nb::tuple account_arrays, nb::handle action_array, nb::tuple tape, nb::tuple rates,
                        nb::tuple limits, int64_t length, double least_equity, nb::handle growth_array,
                        nb::handle ended_array) {
    const Market market(tape, rates, limits);
    const size_t A = market.tape.n_assets;
    const Accounts accounts(account_arrays, A);
    const size_t N = accounts.n_envs;
    const double *action = View<const double>(action_array, N, A).data;
    double *growth = View<double>(growth_array, N).data;
    bool *ruined = View<bool>(ended_array, 2, N).data, *over = ruined + N;
    accounts.expect_bars(market.tape.n_bars, 1);
    size_t n_ended = 0;
    for (size_t n = 0; n < N; ++n) {
        const double before = accounts.equity[n];
        advance(accounts, n, action + n * A, market);
        growth[n] = std::max(accounts.equity[n], least_equity) / before;
        accounts.t[n] += 1;
        accounts.steps[n] += 1;
        ruined[n] = accounts.equity[n] <= market.limits.ruin;
        over[n] = ruined[n] || accounts.steps[n] >= length;
        n_ended += over[n];
    }
    return n_ended;
}

static void observe(nb::tuple account_arrays, nb::handle feature_rows, nb::handle marks, int64_t length,
                    nb::handle column_array, nb::handle observation) {
    const View<const float> rows(feature_rows);
    const View<const double> mark(marks);
    const size_t A = mark.columns, F = rows.columns;
    const Accounts accounts(account_arrays, A);
    const View<float> out(observation);
    const int64_t *column = View<const int64_t>(column_array, 4).data;
    accounts.expect_bars(std::min(rows.rows, mark.rows), 0);
    const auto fits = [&](size_t i, size_t n) { return column[i] < 0 || column[i] + n <= out.columns; };
    if (out.rows != accounts.n_envs || F > out.columns || !fits(0, A) || !fits(1, A) || !fits(2, 1) || !fits(3, 1))
        throw std::invalid_argument("observe: the observation has no room for a column.");
    for (size_t n = 0; n < accounts.n_envs; ++n) {
        const double *price = mark.data + accounts.t[n] * A, worth = accounts.equity[n];
        const double *units = accounts.units + n * A, *entry = accounts.entry + n * A;
        float *shown = out.data + n * out.columns;
        std::copy_n(rows.data + accounts.t[n] * F, F, shown);
        for (size_t a = 0; a < A && column[0] >= 0; ++a) shown[column[0] + a] = float(units[a] * price[a] / worth);
        for (size_t a = 0; a < A && column[1] >= 0; ++a)
            shown[column[1] + a] = float(100.0 * units[a] * (price[a] - entry[a]) / worth);
        if (column[2] >= 0) shown[column[2]] = float(double(length - accounts.steps[n]) / double(length));
        if (column[3] >= 0) shown[column[3]] = float(100.0 * accounts.returns[n]);
    }
}

static size_t follow(nb::tuple account_arrays, nb::handle target_weights, nb::tuple tape, nb::tuple rates,
                     nb::tuple limits, nb::handle record_array, nb::handle held_weights) {
    const Market market(tape, rates, limits);
    const size_t S = View<const double>(target_weights).rows, A = market.tape.n_assets;
    const Accounts account(account_arrays, A);
    const double *targets = View<const double>(target_weights, S, A).data;
    double *record = View<double>(record_array, S, 4).data, *held = View<double>(held_weights, S, A).data;
    if (account.n_envs != 1) throw std::invalid_argument("follow: one account.");
    account.expect_bars(market.tape.n_bars, S);
    nb::gil_scoped_release released;
    for (size_t s = 0; s < S; ++s) {
        advance(account, 0, targets + s * A, market);
        account.t[0] += 1;
        const double row[] = {*account.equity, *account.costs, *account.turnover, *account.fees};
        std::copy_n(row, 4, record + 4 * s);
        const double *mark = market.tape.mark + account.t[0] * A;
        for (size_t a = 0; a < A; ++a) held[s * A + a] = account.units[a] * mark[a] / row[0];
        if (row[0] <= market.limits.ruin) return s + 1;
    }
    return S;
}

void bind_market(nb::module_ &module) {
    module.def("close_bar", &close_bar, nb::arg("accounts"), nb::arg("action"), nb::arg("tape"), nb::arg("rates"),
               nb::arg("limits"), nb::arg("length"), nb::arg("least_equity"), nb::arg("growth"), nb::arg("ended"));
    module.def("observe", &observe, nb::arg("accounts"), nb::arg("rows"), nb::arg("mark"), nb::arg("length"),
               nb::arg("columns"), nb::arg("out"));
    module.def("follow", &follow, nb::arg("accounts"), nb::arg("targets"), nb::arg("tape"), nb::arg("rates"),
               nb::arg("limits"), nb::arg("record"), nb::arg("held"));
}

}  // namespace tailguard

"""Replay target weights in nautilus_trader: run by test_engines.py in its own venv. Arguments: input.npz output.npz.

Each bar becomes two quotes per asset: the open with its spread, at which orders fill, and the close, at which the
engine's own account is valued and the next orders are sized.
"""

import sys
from decimal import Decimal

import numpy as np
from nautilus_trader.backtest.engine import BacktestEngine
from nautilus_trader.config import BacktestEngineConfig, LoggingConfig, RiskEngineConfig, StrategyConfig
from nautilus_trader.model.currencies import BTC
from nautilus_trader.model.data import QuoteTick
from nautilus_trader.model.enums import AccountType, CurrencyType, OmsType, OrderSide
from nautilus_trader.model.identifiers import InstrumentId, Symbol, Venue
from nautilus_trader.model.instruments import CurrencyPair
from nautilus_trader.model.objects import Currency, Money, Price, Quantity
from nautilus_trader.trading.strategy import Strategy

DIGITS = 10  # of sizes and money: rounding must stay below the tolerance of the test
HOUR = 3_600_000_000_000
BEGIN = 1_600_000_000_000_000_000  # the engine aborts on stamps near zero

given = np.load(sys.argv[1])
n_bars, n_assets = given["close"].shape
fee, adverse = float(given["fee"]), float(given["adverse"])
PRICE_DIGITS = 15 if given["open"].min() < 1 else 10
unit = Currency("TGD", DIGITS, 0, "Test money", CurrencyType.CRYPTO)
venue = Venue("TEST")


def instrument(a):
    name = f"A{a}/TGD"
    return CurrencyPair(
        instrument_id=InstrumentId(Symbol(name), venue),
        raw_symbol=Symbol(name),
        base_currency=BTC,
        quote_currency=unit,
        price_precision=PRICE_DIGITS,
        size_precision=DIGITS,
        price_increment=Price(10**-PRICE_DIGITS, PRICE_DIGITS),
        size_increment=Quantity(10**-DIGITS, DIGITS),
        lot_size=None,
        max_quantity=None,
        min_quantity=None,
        max_notional=None,
        min_notional=None,
        max_price=None,
        min_price=None,
        margin_init=Decimal(0),
        margin_maint=Decimal(0),
        maker_fee=Decimal(str(fee)),
        taker_fee=Decimal(str(fee)),
        ts_event=0,
        ts_init=0,
    )


instruments = [instrument(a) for a in range(n_assets)]
size = Quantity(1e9, DIGITS)


def quote(a, low, high, ts):
    return QuoteTick(instruments[a].id, Price(low, PRICE_DIGITS), Price(high, PRICE_DIGITS), size, size, ts, ts)


def quotes():
    for t in range(n_bars):
        for a in range(n_assets):
            price = given["open"][t, a]
            yield quote(a, price * (1 - adverse), price * (1 + adverse), BEGIN + t * HOUR + a)
        for a in range(n_assets):
            yield quote(a, given["close"][t, a], given["close"][t, a], BEGIN + t * HOUR + HOUR // 2 + a)


class Rebalance(Strategy):
    def on_start(self):
        self.n_quotes, self.pending = 0, {}
        self.equity, self.fees = np.zeros(n_bars), np.zeros(n_bars)
        for one in instruments:
            self.subscribe_quote_ticks(one.id)

    def on_quote_tick(self, tick):
        t, place = divmod(self.n_quotes, 2 * n_assets)
        self.n_quotes += 1
        if place < n_assets:
            self.trade(t, place)
        elif place == 2 * n_assets - 1:
            self.decide(t)

    def trade(self, t, a):
        units = self.pending.pop(a, 0.0)
        if round(abs(units), DIGITS) > 0 and given["fillable"][t, a]:
            side = OrderSide.BUY if units > 0 else OrderSide.SELL
            self.submit_order(self.order_factory.market(instruments[a].id, side, Quantity(abs(units), DIGITS)))

    def decide(self, t):
        worth = self.portfolio.account(venue).balance_total(unit).as_double()
        held = np.zeros(n_assets)
        for a, one in enumerate(instruments):
            for position in self.cache.positions_open(instrument_id=one.id):
                held[a] = position.signed_qty
                worth += position.unrealized_pnl(Price(given["close"][t, a], PRICE_DIGITS)).as_double()
        self.equity[t] = worth
        if t + 1 < n_bars:
            wanted = given["weights"][t] * worth / given["close"][t] - held
            self.pending = dict(enumerate(wanted.tolist()))

    def on_order_filled(self, event):
        self.fees[(self.n_quotes - 1) // (2 * n_assets)] += event.commission.as_double()


engine = BacktestEngine(
    BacktestEngineConfig(logging=LoggingConfig(bypass_logging=True), risk_engine=RiskEngineConfig(bypass=True))
)
engine.add_venue(
    venue=venue,
    oms_type=OmsType.NETTING,
    account_type=AccountType.MARGIN,
    base_currency=unit,
    starting_balances=[Money(float(given["cash"]), unit)],
)
for one in instruments:
    engine.add_instrument(one)
engine.add_data(list(quotes()))
strategy = Rebalance(StrategyConfig())
engine.add_strategy(strategy)
engine.run()
n_orders = len(engine.cache.orders())
np.savez(sys.argv[2], equity=strategy.equity, fees=strategy.fees, n_orders=n_orders)
engine.dispose()

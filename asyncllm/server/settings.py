"""What the HTTP server may be told. Loop thread; frozen. It never knows models or the engine."""

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on what one client can cost."""

    max_body_bytes: int = 32 << 20  # a 128k-token prompt is at most a few MB; aiohttp's own 1 MiB refuses that
    body_timeout_s: float = 30.0  # for the whole body, from the first header on
    send_timeout_s: float = 30.0  # how long a reader may leave its socket full
    keepalive_s: float = 75.0  # longer than the usual 60 s of proxies; also bounds the headers' arrival
    drain_s: float = 30.0  # after SIGTERM

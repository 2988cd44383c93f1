"""What the HTTP server may be told. Loop thread; frozen. It never knows models or the engine."""

import msgspec

from .keys import ApiKey


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Who may come in, and by which way."""

    keys: tuple[ApiKey, ...] = ()  # none: whoever comes is served
    hosts: tuple[str, ...] | None = None  # names that Host may say, beside addresses; None: any
    origins: tuple[str, ...] = ()  # foreign pages that may ask; each as its browser says it
    admin_port: int | None = None  # where metrics are, if not among the other routes; on loopback
    certfile: str | None = None  # with keyfile: TLS
    keyfile: str | None = None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on what one client can cost."""

    max_body_bytes: int = 32 << 20  # a 128k-token prompt is at most a few MB; aiohttp's own 1 MiB refuses that
    body_timeout_s: float = 30.0  # for the whole body, from the first header on
    send_timeout_s: float = 30.0  # how long a reader may leave its socket full
    max_unread_bytes: int = 4 << 20  # and how much may wait for it meanwhile
    peer_timeout_s: float = 60.0  # after which a peer that answers no packet counts as gone
    keepalive_s: float = 75.0  # of an idle connection: longer than the usual 60 s of proxies
    sse_comment_s: float = 0.0  # 0: no comments in a silent event stream; some readers choke on them
    drain_s: float = 30.0  # after SIGTERM
    watchdog_s: float = 120.0  # a step longer than this is stuck; 0 waits for ever
    header_timeout_s: float = 15.0  # for a request's head, however it dribbles
    max_connections: int = 0  # 0: four fifths of the file descriptors this process may have
    requests_per_minute: float = 0.0  # of each key; 0: any number
    # -- responses --
    retention_s: float = 600.0  # how long an ended response can be asked for
    max_retained_bytes: int = 64 << 20  # of all of them
    resume_grace_s: float = 30.0  # how long a resumable response goes on without a client
    # -- WebSocket --
    max_sockets: int = 8192
    max_lanes: int = 32  # with a name; OpenAI's own limits, as the next two
    max_active_per_socket: int = 16  # further creates queue
    socket_lifetime_s: float = 3600.0  # after which a socket takes no more creates
    max_queued_per_socket: int = 64
    heartbeat_s: float = 25.0  # pings; below the usual 60 s of proxies
    # --
    access: Access = Access()

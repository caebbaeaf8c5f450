"""Who may do what on the broker: the exports of CORE, the imports of the other accounts, the rights of each role.

Streams and steward live in CORE; agents live in AGENTS, the pipeline in PIPE, whoever was invited in INVITE and the
workers of links in LINK, which have no JetStream and import only what they need. The reason is measured: inside one
account a reply subject is never checked, so a pull status aimed at `$JS.API.STREAM.DELETE.X` is obeyed, and so is a
value of its own that a credential reads with such a reply. Across a service import the reply is resolved in the
importing account. There a *literal* import still takes it for a request; a wildcard import does not. So every service
import is a wildcard, and the user's rights name what it may ask.
Every line here has a probe in `tidings_testing/security/`. `tests/unit/admin/test_layout.py` notices every change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tidings.contract.catalogue import services_of
from tidings.contract.core import CallerKind
from tidings.nats import jwt
from tidings.nats.jwt import Claims, Permissions, UserLimits
from tidings.wire.invitations import InvitationLine
from tidings.wire.subjects import (
    BLOCK_SHARDS,
    RULING_KINDS,
    StateKey,
    StreamKind,
    Subjects,
)

#: payload of a message plus room for headers; LOG, DM and TASK refuse more
MAX_MESSAGE = 264 * 1024
#: of one connection; a channel or pattern takes two
MAX_SUBSCRIPTIONS = 1_000
#: fewer than the broker takes, so that agents cannot keep the steward and an administrator out
MAX_AGENT_CONNECTIONS = 19_000
#: each worker of a Spark cluster holds one or two
MAX_PIPELINE_CONNECTIONS = 500
#: of everybody who was invited together: a line that leaked keeps nobody out for longer than it takes to revoke it
MAX_INVITED_CONNECTIONS = 64
#: what whoever was invited says is one short request
MAX_INVITED_PAYLOAD, MAX_INVITED_SUBSCRIPTIONS = 4_096, 2
#: whoever was invited to a link says in it what is agreed, with a token and where its own broker is
MAX_LINKING_PAYLOAD = 32_768
#: of the workers of all links together; the watcher closes what one of them has too many
MAX_LINK_CONNECTIONS = 300
#: what the worker of another space says is a request, and what it hears are answers and wakes
MAX_PEER_PAYLOAD, MAX_PEER_SUBSCRIPTIONS = 64 * 1024, 8
#: the CONNECT line carries the token; the broker is configured for 64 KiB
MAX_TOKEN_BYTES = 60_000

#: Seconds after which the broker forgets a request through an import that nobody answered. Without a bound of ours it
#: keeps 700 bytes of each for minutes, and some it never answers itself: the acknowledgement of what was not delivered,
#: a chat on a subject no stream takes. An answer that is later than this is lost, so it is no less than callers wait.
ACK_ANSWER = 2
PUBLISH_ANSWER = 5
CONTROL_ANSWER = 60
#: a reader asks again after 2 s
BLOCK_ANSWER = 5
#: pulls expire after at most 10 s
PULL_ANSWER = 30
#: a frame of half a megabyte on a busy disk is waited for 30 s
PIPELINE_ANSWER = 60


def _consumer_streams(s: Subjects) -> tuple[str, str]:
    return s.delivery_stream, s.direct_stream


def block_get(s: Subjects) -> str:
    """What every agent may ask for a sealed block by its name; without the key that is in frames it opens nothing.

    A direct get takes wildcards, and answers with the newest of what they cover. The literal token at the end keeps
    `>` from covering a name, and `agents_mappings` makes `*` cover the blocks of one shard, which is one name's. Bodies
    that ask for more (a sequence, a batch) are refused by the broker where the subject names what is wanted; the forms
    that take it from the body have another subject, and must never be imported.
    """
    return f"$JS.API.DIRECT.GET.{s.block_stream}.{s.root}.blk.*.*.b"


def agents_mappings(s: Subjects) -> Mapping[str, str]:
    """The shard of the block an agent asks for is computed by the broker, whatever the agent says it is."""
    asked, shard = block_get(s), f"{{{{partition({BLOCK_SHARDS},2)}}}}"
    return {asked: asked.replace("*.*", f"{shard}.{{{{wildcard(2)}}}}")}


def service_subjects(s: Subjects) -> dict[str, int]:
    """Requests with one answer, and how long the broker waits for it."""
    published = {f"{s.root}.{kind}.>": PUBLISH_ANSWER for kind in ("chat", "dm", "task")}
    control = {f"{s.root}.ctl.{service}.*": CONTROL_ANSWER for service in services_of("agent")}
    acknowledged = {f"$JS.ACK.{stream}.>": ACK_ANSWER for stream in _consumer_streams(s)}
    return published | control | acknowledged | {block_get(s): BLOCK_ANSWER}


def pull_subjects(s: Subjects) -> dict[str, int]:
    """Requests with a stream of answers."""
    return {f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*": PULL_ANSWER for stream in _consumer_streams(s)}


def pipeline_service_subjects(s: Subjects) -> dict[str, int]:
    """What PIPE may ask with one answer."""
    asked = (
        f"{s.root}.dlv.>",
        f"{s.root}.blk.*.*.b",
        f"$KV.{s.state_bucket}.>",
        f"$JS.API.DIRECT.GET.KV_{s.state_bucket}.>",
        f"$JS.API.CONSUMER.INFO.{s.delivery_stream}.*",
        *(f"$JS.API.STREAM.{verb}.*" for verb in ("INFO", "MSG.GET", "PURGE")),
        # Nobody asks this. An account that does not import `$JS.API.INFO` gets an import of all of `$JS.API.>` from the
        # server, which answers "not enabled for account" before CORE does.
        "$JS.API.*",
    )
    return dict.fromkeys(asked, PIPELINE_ANSWER)


def pipeline_page_subjects(_s: Subjects) -> dict[str, int]:
    """What PIPE may ask with a stream of answers: pages of the log."""
    return {"$JS.API.DIRECT.GET.*": PIPELINE_ANSWER}


def invitation_subjects(s: Subjects) -> dict[str, int]:
    """What INVITE may ask."""
    return {f"{s.root}.ctl.{service}.*": CONTROL_ANSWER for service in services_of("invited")}


def link_subjects(s: Subjects) -> dict[str, int]:
    """What LINK may ask: linked spaces for pages, our own worker what was admitted, and to have more admitted."""
    return {
        **{f"{s.root}.ctl.{service}.*": CONTROL_ANSWER for service in services_of("peer", "link worker")},
        f"{s.root}.via.>": PUBLISH_ANSWER,
        f"{s.root}.dm.>": PUBLISH_ANSWER,
        f"{s.root}.task.>": PUBLISH_ANSWER,
    }


def link_live_subjects(s: Subjects) -> list[str]:
    """What LINK may hear. Copies of link records have such subjects too: no user may hear but the one it is named in,
    and no link is called like a user."""
    return [f"{s.root}.live.link.*"]


def live_subjects(s: Subjects) -> list[str]:
    """Stream exports. LOG republishes ruling records too; those stay inside CORE."""
    return [f"{s.root}.live.chat.>", f"{s.root}.live.via.>", s.live_roster]


def core_exports(s: Subjects) -> list[Claims]:
    def service(subject: str, seconds: int, **more: str) -> Claims:
        patience = {"response_threshold": seconds * 1_000_000_000}
        return {"name": subject, "subject": subject, "type": "service", **patience, **more}

    single = service_subjects(s) | pipeline_service_subjects(s) | invitation_subjects(s) | link_subjects(s)
    many = pull_subjects(s) | pipeline_page_subjects(s)
    return [
        *(service(subject, seconds) for subject, seconds in single.items()),
        *(service(subject, seconds, response_type="Stream") for subject, seconds in many.items()),
        *(
            {"name": subject, "subject": subject, "type": "stream"}
            for subject in (*live_subjects(s), *link_live_subjects(s))
        ),
    ]


def agents_imports(s: Subjects, core_id: str) -> list[Claims]:
    return [
        *(_imported(core_id, subject, "service") for subject in (*service_subjects(s), *pull_subjects(s))),
        *(_imported(core_id, subject, "stream") for subject in live_subjects(s)),
    ]


def pipeline_imports(s: Subjects, core_id: str) -> list[Claims]:
    asked = (*pipeline_service_subjects(s), *pipeline_page_subjects(s))
    return [_imported(core_id, subject, "service") for subject in asked]


def invitation_imports(s: Subjects, core_id: str) -> list[Claims]:
    return [_imported(core_id, subject, "service") for subject in invitation_subjects(s)]


def link_imports(s: Subjects, core_id: str) -> list[Claims]:
    return [
        *(_imported(core_id, subject, "service") for subject in link_subjects(s)),
        *(_imported(core_id, subject, "stream") for subject in link_live_subjects(s)),
    ]


def _imported(core_id: str, subject: str, kind: str) -> Claims:
    return {"name": subject, "subject": subject, "account": core_id, "type": kind}


def _control_requests(s: Subjects, caller: CallerKind, user_id: str) -> list[str]:
    return [f"{s.root}.ctl.{service}.{user_id}" for service in services_of(caller)]


def inbox(user_id: str) -> str:
    """Each user has its own inbox prefix, so that nobody can listen to another's replies."""
    return f"_INBOX_{user_id}.>"


def agent_permissions(
    s: Subjects, agent_id: str, read: Iterable[str], post: Iterable[str], *, withheld: bool = False
) -> Permissions:
    """What an agent's credential allows. `withheld`: it flooded, and sends nothing into any stream; it still reads."""
    sends = [
        *(f"{s.root}.chat.{agent_id}.{pattern}" for pattern in post),
        f"{s.root}.dm.*.*.{agent_id}",
        f"{s.root}.task.*.{agent_id}",
    ]
    return Permissions(
        publish=[
            *([] if withheld else sends),
            f"{s.root}.ctl.*.{agent_id}",
            f"$JS.API.CONSUMER.MSG.NEXT.{s.delivery_stream}.dlv_{agent_id}",
            f"$JS.API.CONSUMER.MSG.NEXT.{s.direct_stream}.dm_{agent_id}",
            f"$JS.ACK.{s.delivery_stream}.dlv_{agent_id}.>",
            f"$JS.ACK.{s.direct_stream}.dm_{agent_id}.>",
            block_get(s),
        ],
        subscribe=[
            inbox(agent_id),
            s.live_roster,
            *(subject for pattern in read for subject in (s.live_chat(pattern), s.live_via(pattern))),
        ],
    )


def agent_limits(expires: int | None = None) -> UserLimits:
    return UserLimits(subscriptions=MAX_SUBSCRIPTIONS, payload=MAX_MESSAGE, expires=expires)


def invitation_text(
    s: Subjects, account: str, invitation: str, issued: int, expires: int, *, for_link: bool = False
) -> str:
    """What the account signs to invite. Whoever has the line may ask for what it promises, and nothing else.

    A line has room for a signature, not for what was signed: every byte of the token follows from the line, the same on
    both sides. Whoever changes something here makes another version of the line.
    """
    asks = Permissions(publish=_control_requests(s, "invited", invitation), subscribe=[inbox(invitation)])
    payload = MAX_LINKING_PAYLOAD if for_link else MAX_INVITED_PAYLOAD
    limits = UserLimits(subscriptions=MAX_INVITED_SUBSCRIPTIONS, payload=payload, expires=expires)
    claims = jwt.user_claims(asks, limits)
    return jwt.unsigned(account, invitation, "invitation", claims, iat=issued, expires=expires)


def invitation_token(line: InvitationLine) -> str:
    """The whole token, put together again by whoever accepts."""
    when = line.issued, line.expires
    text = invitation_text(Subjects(line.space), line.account, line.key.id, *when, for_link=line.for_link)
    return jwt.with_signature(text, line.signature)


def peer_permissions(s: Subjects, peer_id: str) -> Permissions:
    """The worker of a linked space: it asks the steward, and hears that there is something new. It writes nothing."""
    return Permissions(publish=_control_requests(s, "peer", peer_id), subscribe=[inbox(peer_id), s.live_link(peer_id)])


def peer_limits(expires: int | None = None) -> UserLimits:
    return UserLimits(subscriptions=MAX_PEER_SUBSCRIPTIONS, payload=MAX_PEER_PAYLOAD, expires=expires)


def link_permissions(s: Subjects, worker_id: str) -> Permissions:
    """This space's own worker of links: it admits what was said elsewhere, and asks what was. It reads no stream, and
    what it puts into mailboxes and queues opens only with the signature of its sender over the space it was written
    in."""
    admitted = [f"{s.root}.{kind}.>" for kind in ("via", "dm", "task")]
    return Permissions(
        publish=[*admitted, *_control_requests(s, "link worker", worker_id)],
        subscribe=[inbox(worker_id)],
    )


def link_limits() -> UserLimits:
    return UserLimits(subscriptions=MAX_PEER_SUBSCRIPTIONS, payload=MAX_MESSAGE)


def steward_permissions(s: Subjects, steward_id: str) -> Permissions:
    """Writes ruling records, answers control requests, executes retention. Cannot write a chat, mint, or delete."""
    state = f"KV_{s.state_bucket}"
    # blocks are the pipeline's to write, the agents' to read and the broker's to remove
    streams = [s.stream(kind) for kind in StreamKind if kind is not StreamKind.BLOCKS]
    mailboxes = (s.direct_stream, s.task_stream, s.delivery_stream)
    return Permissions(
        publish=[
            *(f"{s.root}.{kind}.>" for kind in RULING_KINDS),
            s.space_record,
            f"{s.root}.aud.>",
            f"{s.root}.dead.>",
            s.live_roster,
            *link_live_subjects(s),
            f"$KV.{s.state_bucket}.>",
            "$JS.API.INFO",
            f"$JS.API.STREAM.UPDATE.{s.log_stream}",
            *(f"$JS.API.STREAM.{verb}.{stream}" for verb in ("INFO", "MSG.GET") for stream in (*streams, state)),
            *(f"$JS.API.DIRECT.GET.{stream}" for stream in streams),
            *(f"$JS.API.STREAM.PURGE.{stream}" for stream in streams),
            *(f"$JS.API.CONSUMER.{verb}.{stream}.>" for verb in ("CREATE", "INFO", "DELETE") for stream in mailboxes),
            f"$JS.API.CONSUMER.MSG.NEXT.{s.task_stream}.>",
            f"$JS.ACK.{s.task_stream}.>",
        ],
        subscribe=[inbox(steward_id), f"{s.root}.ctl.>", f"{s.root}.live.chat.>", f"{s.root}.live.via.>"],
        responses=True,
    )


def pipeline_permissions(s: Subjects, pipeline_id: str) -> Permissions:
    """Reads the log, writes mailboxes, blocks and its own floors. Cannot write a message or ruling, or read mail."""
    state = f"$KV.{s.state_bucket}"
    kept = (StateKey.DELIVER_FLOOR, StateKey.DELIVER_BEAT, StateKey.DELIVER_FIGURES, StateKey.EMPTIED)
    return Permissions(
        publish=[
            f"{s.root}.dlv.>",
            f"{s.root}.blk.*.*.b",
            *(f"{state}.{key}" for key in kept),
            *(f"$JS.API.DIRECT.GET.KV_{s.state_bucket}.{state}.{key}" for key in (*kept, StateKey.LOG_FLOOR)),
            *(f"$JS.API.STREAM.{verb}.{s.log_stream}" for verb in ("INFO", "MSG.GET")),
            f"$JS.API.DIRECT.GET.{s.log_stream}",
            *(f"$JS.API.STREAM.{verb}.{s.delivery_stream}" for verb in ("INFO", "MSG.GET", "PURGE")),
            f"$JS.API.CONSUMER.INFO.{s.delivery_stream}.*",
        ],
        subscribe=[inbox(pipeline_id)],
    )


def watcher_permissions(watcher_id: str, *accounts: str) -> Permissions:
    """A user of the system account that hears of connections of these accounts, lists them, and closes one."""
    words = [f"$SYS.ACCOUNT.{account}.{word}" for account in accounts for word in ("CONNECT", "DISCONNECT")]
    return Permissions(
        publish=[*(f"$SYS.REQ.ACCOUNT.{account}.CONNZ" for account in accounts), "$SYS.REQ.SERVER.*.KICK"],
        subscribe=[inbox(watcher_id), *words],
    )


def owner_permissions(s: Subjects, user_id: str) -> Permissions:
    """A short-lived admin process that only asks the steward: `agent add`, `revoke`, `space set`."""
    return Permissions(publish=_control_requests(s, "admin", user_id), subscribe=[inbox(user_id)])

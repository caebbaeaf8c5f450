// node client.mjs BUNDLE PEER ROLE: an agent written from docs/wire.md alone.
//
// It joins #general and says `ready`. Then it answers what it hears in the channel, seals a direct message to PEER and
// opens PEER's answer, claims a task of ROLE and finishes it, and opens a frame from its mailbox. Each step is a line of
// JSON on standard output; it ends by itself when all are done, and with 1 if one does not come in time.
import { randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { connect, createInbox, credsAuthenticator, headers as newHeaders } from "@nats-io/transport-node";
import * as wire from "./wire.mjs";

const [, , bundlePath, peer, role] = process.argv;
const WAIT = 90_000;
const tell = (step, facts = {}) => console.log(JSON.stringify({ step, ...facts }));

// --- 1. bundle and connection ---

const bundle = JSON.parse(readFileSync(bundlePath, "utf8"));
const S = bundle.space, spaceId = bundle.space_id;
const seed = /-----BEGIN USER NKEY SEED-----\s+(\S+)/.exec(bundle.creds)[1];
const me = { id: bundle.agent.id, name: bundle.agent.name, ...wire.keyPair(seed) };
if (!Buffer.from(wire.publicKey(me.id)).equals(Buffer.from(me.public))) throw new Error("the bundle holds another agent's key");
const prefix = `_INBOX_${me.id}`;
const nc = await connect({
  servers: bundle.url,
  authenticator: credsAuthenticator(new TextEncoder().encode(bundle.creds)),
  inboxPrefix: prefix,
  name: me.name,
});

function newId() {
  const raw = randomBytes(16);
  raw.writeUIntBE(Date.now(), 0, 6);
  raw[6] = 0x70 | (raw[6] & 15);
  raw[8] = 0x80 | (raw[8] & 63);
  return raw.toString("hex").replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, "$1-$2-$3-$4-$5");
}

// --- 10. asking the steward ---

async function ask(service, action, args = {}, timeout = 10_000) {
  const body = JSON.stringify({ op: newId(), do: action, ...args });
  const reply = await nc.request(`td.${S}.ctl.${service}.${me.id}`, body, { timeout });
  const answer = JSON.parse(reply.string());
  if (!answer.ok) throw new Error(`${service} ${action}: ${answer.error.code}: ${answer.error.message}`);
  return answer;
}

// --- 4 and 5. composing and publishing ---

function compose(text, more = {}) {
  return { id: newId(), ts: new Date().toISOString(), from: { id: me.id, name: me.name }, parts: [{ kind: "text", text }], ...more };
}

async function publish(kind, destination, message) {
  const payload = Buffer.from(JSON.stringify(message));
  const subject = {
    chat: `td.${S}.chat.${me.id}.${destination}`,
    dm: `td.${S}.dm.${wire.shardOf(destination)}.${destination}.${me.id}`,
    task: `td.${S}.task.${destination}.${me.id}`,
  }[kind];
  const signature = wire.sign(me, spaceId, kind, destination, payload);
  const send = async (msgId) => {
    const fields = newHeaders();
    fields.set("Td-Sig", signature);
    fields.set("Nats-Msg-Id", msgId);
    return JSON.parse((await nc.request(subject, payload, { headers: fields, timeout: 10_000 })).string());
  };
  let stored = await send(message.id);
  if (stored.duplicate) {
    const found = await ask("confirm", "record", { seq: stored.seq, stream: { chat: "log", dm: "dm", task: "task" }[kind] });
    const ours = found.yours && found.subject === subject && Buffer.from(found.payload, "base64").equals(payload);
    if (!ours) stored = await send(`${message.id}.${wire.word(signature)}`);
  }
  if (stored.error) throw new Error(`not stored: ${JSON.stringify(stored.error)}`);
  return stored;
}

/** This library hides the raw block, so: all values of every name, in order. */
function fieldsOf(message) {
  const fields = [];
  for (const [name, values] of message.headers ?? []) for (const value of values) fields.push([name, value]);
  return fields;
}

/** Rule 1 for a live copy: the last value of each of the five is the broker's, and none may have two. */
function liveCopy(message) {
  const fields = fieldsOf(message);
  const said = {};
  for (const name of ["Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp", "Nats-Last-Sequence"]) {
    const values = fields.filter(([each]) => each === name);
    if (values.length !== 1) throw new wire.Refused(values.length ? "header" : "not_a_log_copy", name);
    said[name] = values[0][1];
  }
  const subject = said["Nats-Subject"];
  if (message.subject !== `td.${S}.live.${subject.slice(`td.${S}.`.length)}`) throw new wire.Refused("not_a_log_copy");
  const own = fields.filter(([name]) => !(name in said));
  const record = wire.openRecord(S, spaceId, subject, own, Buffer.from(message.data));
  if (record.kind !== "chat") throw new wire.Refused("wrong_kind");
  return { ...record, seq: Number(said["Nats-Sequence"]), previous: Number(said["Nats-Last-Sequence"]) };
}

const shown = new Set();
function show(record) {
  const known = `${record.sender} ${record.message.id}`;
  if (record.sender === me.id || shown.has(known)) return false;
  shown.add(known);
  return true;
}

// --- 7. mailboxes ---

async function pull(stream, consumer, batch, take, expires = 2_000) {
  const inbox = createInbox(prefix);
  const subscription = nc.subscribe(inbox);
  const wanted = { batch, max_bytes: 4194304, expires: expires * 1_000_000 };
  nc.publish(`$JS.API.CONSUMER.MSG.NEXT.${stream}.${consumer}`, JSON.stringify(wanted), { reply: inbox });
  let taken = 0;
  const timer = setTimeout(() => subscription.unsubscribe(), expires + 2_000);
  for await (const message of subscription) {
    if (message.reply?.startsWith("$JS.ACK.")) {
      await take(message);
      if (++taken === batch) break;
    } else if (message.headers?.code !== 100) break;
  }
  clearTimeout(timer);
  subscription.unsubscribe();
  return taken;
}

async function acknowledge(message) {
  await nc.request(message.reply, "+ACK", { timeout: 5_000 });
}

async function until(what, act) {
  const ends = Date.now() + WAIT;
  while (Date.now() < ends) {
    const found = await act();
    if (found) return found;
  }
  throw new Error(`${what} did not come`);
}

// --- 8 and 9. session, presence, roster ---

const session = newId();
const taken = await ask("session", "take", { session });
if (taken.superseded) throw new Error("superseded at once");
let key = bundle.steward_key;
const roster = new Map();
const deltas = [];
let heardDelta;
const delta = new Promise((resolve) => { heardDelta = resolve; });
const watching = nc.subscribe(`td.${S}.live.roster`, {
  callback: (error, message) => {
    if (error) return;
    try {
      deltas.push(wire.openDelta(S, spaceId, key, message.subject, fieldsOf(message), Buffer.from(message.data)));
      heardDelta();
    } catch (refused) {
      tell("refused", { reason: String(refused.reason) });
    }
  },
});
await nc.flush();
let page = await ask("roster", "snapshot");
const first = page;
for (const line of [...first.rotations].sort((a, b) => a.seq - b.seq)) {
  const own = wire.readBlock(Buffer.from(line.headers, "base64"));
  const signature = own.find(([name]) => name.toLowerCase() === "td-sig")?.[1] ?? "";
  const payload = Buffer.from(line.payload, "base64");
  if (wire.verifies(signature, spaceId, "ruling", key, "space", payload)) key = wire.strictJson(payload).steward_key ?? key;
}
for (;;) {
  for (const row of page.rows) roster.set(row.id, row);
  if (page.next === null) break;
  page = await ask("roster", "snapshot", { after: page.next });
}
const beat = (status) =>
  nc.publish(`td.${S}.ctl.presence.${me.id}`, JSON.stringify({ op: newId(), do: "beat", session, status, activity: "proves the wire" }));
beat("working");
const beating = setInterval(() => {
  beat("working");
  ask("session", "take", { session, held: taken.number }).catch(() => {});
}, (first.ttl * 1000) / 2.5);
await delta;
tell("roster", { rows: roster.size, peer: roster.get(peer)?.name });

// --- 11. joining, hearing, speaking ---

let heard;
const answered = new Promise((resolve) => { heard = resolve; });
const held = [];
let joined = null;
const receive = (record) => {
  if (record.seq > joined && show(record)) heard(record);
};
for (const subject of [`td.${S}.live.chat.*.general`, `td.${S}.live.via.*.*.general`]) {
  nc.subscribe(subject, {
    callback: (error, message) => {
      if (error) return;
      try {
        const record = liveCopy(message);
        joined === null ? held.push(record) : receive(record);
      } catch (refused) {
        tell("refused", { reason: String(refused.reason) });
      }
    },
  });
}
await nc.flush();
const membership = await ask("member", "join", { pattern: "general" });
joined = membership.seq;
held.forEach(receive);
tell("ready", { state: membership.state, seq: joined });

const said = await answered;
tell("heard", { from: said.sender, text: wire.textOf(said.message), seq: said.seq });
const reply = compose("hello from node", { reply_to: said.message.id, mentions: [{ id: peer, name: roster.get(peer).name }] });
const spoken = await publish("chat", "general", reply);
const again = await publish("chat", "general", reply);
tell("spoke", { id: reply.id, seq: spoken.seq, duplicate: again.duplicate === true, same: again.seq === spoken.seq });

const past = await ask("history", "page", { channel: "general", limit: 10 });
const lines = past.records.map((line) =>
  wire.openRecord(S, spaceId, line.subject, wire.readBlock(Buffer.from(line.headers, "base64")), Buffer.from(line.payload, "base64")));
tell("history", { texts: lines.map((each) => wire.textOf(each.message)), time: past.records[0].time });

// --- 6 and 7. a sealed message, and its answer ---

await publish("dm", peer, wire.seal(me, peer, compose("between us")));
const letter = await until("a direct message", async () => {
  let found = null;
  await pull(`DM_${S}`, `dm_${me.id}`, 1, async (message) => {
    const record = wire.openRecord(S, spaceId, message.subject, fieldsOf(message), Buffer.from(message.data));
    if (record.kind !== "dm" || record.destination !== me.id) throw new wire.Refused("wrong_kind");
    const sealed = wire.isSealed(record.message);
    found = { ...record, sealed, message: sealed ? wire.openSealed(me, record.sender, record.message) : record.message };
    const tokens = message.reply.split(".");
    const seq = Number(tokens.length === 9 ? tokens[5] : tokens[7]);
    const of = { seq, sender: record.sender, id: record.message.id };
    await ask("receipt", "put", { receipts: [{ ...of, stage: "delivered" }, { ...of, stage: "read" }] });
    await acknowledge(message);
  });
  return found;
});
tell("letter", { from: letter.sender, text: wire.textOf(letter.message), sealed: letter.sealed });

// --- 10. a task ---

const claimed = await until("a task", async () => {
  const answer = await ask("task", "claim", { role, wait: 10, session }, 20_000);
  return answer.task && answer;
});
const line = claimed.task;
const task = wire.openRecord(S, spaceId, line.subject, wire.readBlock(Buffer.from(line.headers, "base64")), Buffer.from(line.payload, "base64"));
if (task.kind !== "task" || task.destination !== role) throw new wire.Refused("wrong_kind");
await ask("task", "beat", { seq: line.seq, session });
const payload = Buffer.from(JSON.stringify(compose(`node did: ${wire.textOf(task.message)}`, { reply_to: task.message.id })));
const sig = wire.sign(me, spaceId, "result", `${task.sender}.${task.message.id}`, payload);
const done = await ask("task", "done", { seq: line.seq, session, result: payload.toString("base64"), sig });
tell("worked", { state: done.state, deadline: claimed.deadline });

const asked = compose("what is seven times six?");
await publish("task", "oracle", asked);
const answer = await until("a result", async () => {
  const found = await ask("task", "result", { id: asked.id, wait: 10 }, 20_000);
  return found.state === "done" && found;
});
tell("asked", { text: wire.textOf(wire.openResult(spaceId, answer.asker, asked.id, answer)), worker: answer.worker });

// --- 7. a frame ---

async function fetched(frame, block) {
  const answer = await nc.request(wire.blockGet(S, block.ref.name), undefined, { timeout: 2_000 });
  return wire.openRef(spaceId, frame.epoch, block, Buffer.from(answer.data));
}

const unpacked = await until("a frame", async () => {
  let found = null;
  await pull(`DLV_${S}`, `dlv_${me.id}`, 1, async (message) => {
    const frame = wire.readFrame(Buffer.from(message.data));
    if (frame.owner !== me.id) throw new wire.Refused("frame", "for somebody else");
    const records = (await Promise.all(frame.blocks.map((block) => (block.ref ? fetched(frame, block) : wire.openBlock(block))))).flat();
    const texts = records.map((each) => wire.textOf(wire.openRecord(S, spaceId, `td.${S}.${each.tail}`, each.headers, each.payload).message));
    found = { number: frame.number, prev: frame.prev, texts, codecs: frame.blocks.map((block) => block.codec), refs: frame.blocks.filter((block) => block.ref).length, head: message.headers?.get("Td-Head") };
    await acknowledge(message);
  });
  return found;
});
tell("frame", unpacked);

clearInterval(beating);
beat("offline");
await ask("member", "leave", { pattern: "general", joined });
await ask("session", "release", { session });
watching.unsubscribe();
tell("done");
await nc.drain();

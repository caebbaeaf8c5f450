// The rules of docs/wire.md as functions, written from that page alone. Section numbers are the page's.
import { createHash } from "node:crypto";
import { decode as unpack, encode as pack } from "@msgpack/msgpack";
import { Decompress } from "fzstd";
import sodium from "libsodium-wrappers";

await sodium.ready;

export const MAX_PAYLOAD = 262144;
const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const bytes = (text) => Buffer.from(text, "utf8");

export class Refused extends Error {
  constructor(reason, detail = "") {
    super(`${reason}: ${detail}`);
    this.reason = reason;
  }
}

// --- 1. keys ---

const BASE32 = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";

function unbase32(text) {
  let bits = 0, value = 0;
  const out = [];
  for (const letter of text) {
    const at = BASE32.indexOf(letter);
    if (at < 0) throw new Refused("key", "not base32");
    value = (value << 5) | at;
    bits += 5;
    if (bits >= 8) {
      bits -= 8;
      out.push((value >> bits) & 255);
      value &= (1 << bits) - 1;
    }
  }
  return Uint8Array.from(out);
}

function crc16(data) {
  let crc = 0;
  for (const byte of data) {
    crc ^= byte << 8;
    for (let i = 0; i < 8; i++) crc = ((crc << 1) ^ (crc & 0x8000 ? 0x1021 : 0)) & 0xffff;
  }
  return crc;
}

/** The 32 bytes of a public key. */
export function publicKey(text) {
  const raw = unbase32(text);
  if (raw.length !== 35 || raw[0] & 7) throw new Refused("key", "length or prefix");
  if ((raw[33] | (raw[34] << 8)) !== crc16(raw.subarray(0, 33))) throw new Refused("key", "checksum");
  return raw.subarray(1, 33);
}

/** id and secret of a seed (`SU...`): two bytes of prefixes, the seed, a checksum. */
export function keyPair(seed) {
  const raw = unbase32(seed);
  const pair = sodium.crypto_sign_seed_keypair(raw.subarray(2, 34));
  return { secret: pair.privateKey, public: pair.publicKey };
}

// --- 2. names and subjects ---

export const isToken = (text) => /^[A-Za-z0-9_-]{1,64}$/.test(text) && !text.endsWith("\n");
export const isAgentId = (text) => /^U[A-Z2-7]{55}$/.test(text) && text.length === 56;
export const isMessageId = (text) =>
  text.length === 36 && /^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/.test(text);
export const isChannel = (text) => text.length > 0 && text.length <= 200 && text.split(".").every(isToken);
export function isPattern(text) {
  if (!text || text.length > 200) return false;
  const tokens = text.split(".");
  const last = tokens.pop();
  return tokens.every((t) => t === "*" || isToken(t)) && (last === "*" || last === ">" || isToken(last));
}
const isTag = (text) => /^[A-Z2-7]{26}$/.test(text) && text.length === 26;

/** Is every channel of `narrow` covered by `wide`? */
export function covers(wide, narrow) {
  if (!isPattern(wide) || !isPattern(narrow)) return false;
  const left = wide.split("."), right = narrow.split(".");
  for (let i = 0; i < left.length; i++) {
    if (left[i] === ">") return right.length > i;
    if (i >= right.length || right[i] === ">" || (left[i] !== "*" && left[i] !== right[i])) return false;
  }
  return left.length === right.length;
}

export const shardOf = (owner) => createHash("sha256").update(owner).digest()[0] % 16;

/** What a subject names; null if it is none of this space. */
export function parseSubject(space, subject) {
  const root = `td.${space}.`;
  if (!subject.startsWith(root) || subject.length - root.length > 1024) return null;
  const [kind, ...t] = subject.slice(root.length).split(".");
  const shard = (token, owner) => isAgentId(owner) && token === String(shardOf(owner));
  switch (kind) {
    case "chat":
      return isAgentId(t[0] ?? "") && isChannel(t.slice(1).join(".")) ? { kind, sender: t[0], destination: t.slice(1).join(".") } : null;
    case "via":
      return isToken(t[0] ?? "") && isAgentId(t[1] ?? "") && isChannel(t.slice(2).join(".")) ? { kind, link: t[0], sender: t[1], destination: t.slice(2).join(".") } : null;
    case "dm":
      return t.length === 3 && shard(t[0], t[1]) && isAgentId(t[2]) ? { kind, sender: t[2], destination: t[1] } : null;
    case "task":
      return t.length === 2 && isToken(t[0]) && isAgentId(t[1]) ? { kind, sender: t[1], destination: t[0] } : null;
    case "ctl":
      return t.length === 2 && isToken(t[0]) && isAgentId(t[1]) ? { kind, service: t[0] } : null;
    case "dlv":
      return (t.length === 1 && t[0] === "lease") || (t.length === 2 && shard(t[0], t[1])) ? { kind } : null;
    case "member":
      return t.length === 2 && isAgentId(t[0]) && isTag(t[1]) ? { kind } : null;
    case "acl":
      return t.length === 1 && isAgentId(t[0]) ? { kind } : null;
    case "channel":
      return t.length === 1 && isTag(t[0]) ? { kind } : null;
    case "link":
      return t.length === 1 && isToken(t[0]) ? { kind } : null;
    case "lease":
      return t.length === 1 && t[0] === "steward" ? { kind } : null;
    case "space":
      return t.length === 0 ? { kind } : null;
    default:
      return null;
  }
}

// --- 3. signatures ---

export const signedBytes = (spaceId, kind, sender, destination, payload) =>
  Buffer.concat([bytes(`td1\n${spaceId}\n${kind}\n${sender}\n${destination}\n`), payload]);

export function sign(me, spaceId, kind, destination, payload) {
  const raw = sodium.crypto_sign_detached(signedBytes(spaceId, kind, me.id, destination, payload), me.secret);
  return Buffer.from(raw).toString("base64url");
}

export function verifies(signature, spaceId, kind, sender, destination, payload) {
  if (!/^[A-Za-z0-9_-]{85}[AQgw]$/.test(signature) || signature.length !== 86) return false;
  if (!["chat", "dm", "task", "result", "ruling"].includes(kind)) return false;
  if (`${spaceId}${sender}${destination}`.includes("\n")) return false;
  try {
    const signed = signedBytes(spaceId, kind, sender, destination, payload);
    return sodium.crypto_sign_verify_detached(Buffer.from(signature, "base64url"), signed, publicKey(sender));
  } catch {
    return false;
  }
}

// --- 4. strict JSON and the message ---

const NUMBER = /-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/y;

/** JSON.parse does not see keys that occur twice, nor how a number was written: walk once, then let it parse. */
export function strictJson(data) {
  let text;
  try {
    text = utf8.decode(data);
  } catch {
    throw new Refused("malformed", "not UTF-8");
  }
  let at = 0;
  const fail = (why) => { throw new Refused("malformed", `${why} at ${at}`); };
  const blanks = () => { while (at < text.length && " \t\r\n".includes(text[at])) at++; };
  const string = () => {
    const start = at;
    if (text[at] !== '"') fail("no text");
    for (at++; text[at] !== '"'; at++) {
      if (at >= text.length) fail("a text without end");
      if (text[at] === "\\") at++;
    }
    at++;
    let found;
    try {
      found = JSON.parse(text.slice(start, at));
    } catch {
      fail("no text of JSON");
    }
    if (!found.isWellFormed()) fail("a lone surrogate");
    return found;
  };
  const value = (depth) => {
    blanks();
    const first = text[at];
    if (first === "{" || first === "[") {
      if (depth === 32) fail("too deep");
      const end = first === "{" ? "}" : "]";
      const keys = new Set();
      at++;
      blanks();
      if (text[at] === end) { at++; return; }
      for (;;) {
        if (first === "{") {
          blanks();
          const key = string();
          if (keys.has(key)) fail(`the key ${key} twice`);
          keys.add(key);
          blanks();
          if (text[at++] !== ":") fail("no colon");
        }
        value(depth + 1);
        blanks();
        const next = text[at++];
        if (next === end) return;
        if (next !== ",") fail("no comma");
      }
    }
    if (first === '"') return void string();
    for (const word of ["true", "false", "null"]) if (text.startsWith(word, at)) { at += word.length; return; }
    NUMBER.lastIndex = at;
    const number = NUMBER.exec(text);
    if (!number) fail("nothing of JSON");
    at += number[0].length;
    if (number[1] || number[2]) {
      if (number[0].length > 64 || !Number.isFinite(Number(number[0]))) fail("a number that is too large");
    } else if (number[0].length > 20 || BigInt(number[0]) !== BigInt.asIntN(64, BigInt(number[0]))) fail("an integer beyond 64 bits");
  };
  value(0);
  blanks();
  if (at !== text.length) fail("something after it");
  return JSON.parse(text);
}

const CONTROL = /[\u0000-\u001f\u007f]/;
const points = (text) => [...text].length;
const isText = (value) => typeof value === "string";
const isLine = (value, most) => isText(value) && value !== "" && points(value) <= most && !CONTROL.test(value);
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const orNothing = (value, rule) => value === undefined || value === null || rule(value);
const isName = (value) => isText(value) && isToken(value);

function isTime(text) {
  const parts = isText(text) && text.length === 24 && /^(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)\.\d{3}Z$/.exec(text);
  if (!parts) return false;
  const [year, month, day, hour, minute, second] = parts.slice(1).map(Number);
  const leap = (year % 4 === 0 && year % 100 !== 0) || year % 400 === 0;
  const days = [31, leap ? 29 : 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
  return year >= 1 && month >= 1 && month <= 12 && day >= 1 && day <= days[month - 1] && hour < 24 && minute < 60 && second < 60;
}

const isPart = (part) => {
  if (!isObject(part) || !isText(part.kind)) return false;
  switch (part.kind) {
    case "text": return isText(part.text);
    case "data": return "data" in part;
    case "artifact":
      return isLine(part.name, 255) && !/[/\\]/.test(part.name) && part.name !== "." && part.name !== ".." &&
        isText(part.media_type) && part.media_type.length <= 255 && /^[!-.0-:<-~]+\/[!-.0-:<-~]+( *;[ -~]+)?$/.test(part.media_type) &&
        isText(part.digest) && part.digest.length === 71 && /^sha256:[0-9a-f]{64}$/.test(part.digest) &&
        Number.isSafeInteger(part.size) && part.size >= 0 &&
        orNothing(part.uri, (uri) => isText(uri) && uri.length <= 2048 && /^[A-Za-z][A-Za-z0-9+.-]*:[!-~]+$/.test(uri));
    default:
      return part.kind.length <= 128 && /^[a-z][a-z0-9-]*(\.[a-z0-9][a-z0-9-]*)+$/.test(part.kind) && !part.kind.endsWith("\n");
  }
};

export function isMessage(m) {
  return isObject(m) && isText(m.id) && isMessageId(m.id) && isTime(m.ts) &&
    isObject(m.from) && isText(m.from.id) && isAgentId(m.from.id) && isName(m.from.name) && orNothing(m.from.role, isName) &&
    Array.isArray(m.parts) && m.parts.length >= 1 && m.parts.length <= 64 && m.parts.every(isPart) &&
    (m.priority === undefined || ["now", "next", "low"].includes(m.priority)) &&
    (m.mentions === undefined || (Array.isArray(m.mentions) && m.mentions.length <= 32 &&
      m.mentions.every((each) => isObject(each) && isText(each.id) && isAgentId(each.id) && isName(each.name)))) &&
    orNothing(m.reply_to, (id) => isText(id) && isMessageId(id)) && orNothing(m.context, (text) => isLine(text, 256));
}

export function readMessage(payload) {
  const message = strictJson(payload);
  if (!isMessage(message)) throw new Refused("malformed", "not a message");
  return message;
}

export const textOf = (message) => message.parts.filter((p) => p.kind === "text").map((p) => p.text).join("\n");

// --- 5. header blocks and records ---

const TAIL = ["Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp", "Nats-Last-Sequence"];

/** Names and values of a block; refused if it is none. */
export function readBlock(block) {
  let text;
  try {
    text = utf8.decode(block);
  } catch {
    throw new Refused("header", "not UTF-8");
  }
  if (!text.endsWith("\r\n\r\n")) throw new Refused("header", "no empty line");
  const [first, ...lines] = text.slice(0, -4).split("\r\n");
  if (!/^NATS\/1\.0([ \t]+[0-9]{3}([ \t]+[^\r\n]*)?)?[ \t]*$/.test(first)) throw new Refused("header", "not NATS/1.0");
  return lines.map((line) => {
    const colon = line.indexOf(":");
    const name = line.slice(0, Math.max(colon, 0)), value = line.slice(colon + 1);
    if (!/^[!-9;-~]+$/.test(name) || /[\u0000-\u0008\u000a-\u001f\u007f]/.test(value)) throw new Refused("header", "a line");
    return [name, value.replace(/^[ \t]+|[ \t]+$/g, "")];
  });
}

/** The sender's own fields, and what the broker appended, cut from the end. */
export function cutTail(fields, names = TAIL) {
  let cut = fields.length;
  const said = {};
  while (cut && names.includes(fields[cut - 1][0]) && !(fields[cut - 1][0] in said)) {
    cut--;
    said[fields[cut][0]] = fields[cut][1];
    if (fields[cut][0] === "Nats-Stream") break;
  }
  return { own: fields.slice(0, cut), said };
}

export const isReserved = (name) => {
  const lower = name.toLowerCase();
  return (lower.startsWith("nats-") && name !== "Nats-Msg-Id") || lower.startsWith("kv-") || lower === "status";
};

/** Where a record of another space was said; null if its headers do not say it in the one way. */
function readOrigin(own) {
  const valuesOf = (name) => own.filter(([each]) => each.toLowerCase() === name).map(([, value]) => value);
  const origins = valuesOf("td-origin"), hops = valuesOf("td-hops");
  if (!hops.length) hops.push("1");
  if (origins.length !== 1 || hops.length !== 1 || !/^[1-9]$/.test(hops[0])) return null;
  const blank = origins[0].indexOf(" ");
  const said = { origin: origins[0].slice(0, blank), theirs: origins[0].slice(blank + 1), hops: Number(hops[0]) };
  return blank > 0 && isChannel(said.theirs) ? said : null;
}

/** What a channel of another space is called here; null if it is not taken. */
function mapped(channels, theirs) {
  if (Object.hasOwn(channels, theirs)) return channels[theirs];
  const patterns = Object.keys(channels).filter((each) => each.endsWith(">")).sort((a, b) => b.length - a.length);
  const pattern = patterns.find((each) => covers(each, theirs));
  if (pattern === undefined) return null;
  const ours = channels[pattern].slice(0, -1) + theirs.slice(pattern.length - 1);
  return isChannel(ours) ? ours : null;
}

/** Does the row of `space links` in force at `seq` let a record in? `timeNs` is when the log took it, a BigInt. */
export function admits(rows, seq, timeNs) {
  return ({ link, destination, origin, theirs, hops }) => {
    const row = rows.filter((each) => each.link === link && each.seq <= seq).sort((a, b) => b.seq - a.seq)[0];
    if (!row || row.state !== "on" || hops > row.hops) return false;
    if (row.until !== null && timeNs >= BigInt(row.until) * 1_000_000_000n) return false;
    const channels = origin === row.origin ? row.channels : row.beyond[origin];
    return channels !== undefined && mapped(channels, theirs) === destination;
  };
}

/** The rules: what a record says, or `Refused` with the reason. Without `admits` nothing of a link is taken. */
export function openRecord(space, spaceId, subject, own, payload, admits) {
  const address = parseSubject(space, subject);
  if (address === null) throw new Refused("malformed_subject", subject);
  const isVia = address.kind === "via" && admits !== undefined;
  if (!isVia && !["chat", "dm", "task"].includes(address.kind)) throw new Refused("wrong_kind", address.kind);
  if (own.some(([name]) => isReserved(name))) throw new Refused("header", "reserved");
  const signatures = own.filter(([name]) => name.toLowerCase() === "td-sig");
  if (signatures.length > 1) throw new Refused("header", "two signatures");
  if (!signatures.length) throw new Refused("signature", "none");
  if (payload.length > MAX_PAYLOAD) throw new Refused("too_large", String(payload.length));
  const said = isVia ? readOrigin(own) : { origin: spaceId, theirs: address.destination };
  if (said === null) throw new Refused("link", "it does not say where it was said");
  const kind = isVia ? "chat" : address.kind;
  if (!verifies(signatures[0][1], said.origin, kind, address.sender, said.theirs, payload)) throw new Refused("signature");
  if (isVia && (said.origin === spaceId || !admits({ ...address, ...said }))) throw new Refused("link");
  const message = readMessage(payload);
  if (message.from.id !== address.sender) throw new Refused("sender_mismatch", message.from.id);
  return { ...address, kind, origin: isVia ? said.origin : null, message };
}

// --- 6. sealing ---

const INSIDE = ["parts", "mentions", "reply_to", "context"];

function sealKey(me, other, sender, target) {
  const shared = sodium.crypto_scalarmult(
    sodium.crypto_sign_ed25519_sk_to_curve25519(me.secret), sodium.crypto_sign_ed25519_pk_to_curve25519(publicKey(other)));
  return sodium.crypto_generichash(32, bytes(`td1-seal\n${sender}\n${target}`), shared);
}

export function seal(me, target, message, nonce = sodium.randombytes_buf(24)) {
  const inside = Object.fromEntries(INSIDE.filter((name) => message[name] !== undefined).map((name) => [name, message[name]]));
  const box = sodium.crypto_aead_xchacha20poly1305_ietf_encrypt(
    bytes(JSON.stringify(inside)), bytes(`td1-seal\n${target}\n${message.id}`), null, nonce, sealKey(me, target, me.id, target));
  const { id, ts, from, priority } = message;
  const part = { kind: "dev.tidings.sealed", v: 1, n: Buffer.from(nonce).toString("base64"), ct: Buffer.from(box).toString("base64") };
  return { id, ts, from, ...(priority ? { priority } : {}), parts: [part] };
}

export const isSealed = (message) => message.parts.length === 1 && message.parts[0].kind === "dev.tidings.sealed";

function unbase64(text) {
  if (!isText(text) || !/^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$/.test(text)) throw new Refused("malformed", "base64");
  return Buffer.from(text, "base64");
}

export function openSealed(me, sender, message) {
  const [part] = message.parts;
  if (part.v !== 1) throw new Refused("malformed", "version");
  const nonce = unbase64(part.n), box = unbase64(part.ct);
  if (nonce.length !== 24 || box.length < 16) throw new Refused("malformed", "nonce or tag");
  let inside;
  try {
    inside = sodium.crypto_aead_xchacha20poly1305_ietf_decrypt(
      null, box, bytes(`td1-seal\n${me.id}\n${message.id}`), nonce, sealKey(me, sender, sender, me.id));
  } catch {
    throw new Refused("seal", "it does not hold");
  }
  const found = strictJson(inside);
  if (!isObject(found)) throw new Refused("malformed", "not an object");
  const { id, ts, from, priority } = message;
  const opened = { id, ts, from, ...(priority ? { priority } : {}) };
  for (const name of INSIDE) if (name in found) opened[name] = found[name];
  if (!isMessage(opened)) throw new Refused("malformed", "what was sealed is no message");
  return opened;
}

// --- 7. frames ---

const isCount = (value) => (Number.isSafeInteger(value) || (typeof value === "bigint" && value < 2n ** 63n)) && value >= 0;
const msgpack = (data) => {
  try {
    return unpack(data, { useBigInt64: true });
  } catch (error) {
    throw new Refused("frame", error.message);
  }
};
const needs = (holds, reason, why) => { if (!holds) throw new Refused(reason, why); };
// with useBigInt64 whatever was written in 64 bits is a bigint, also a small number
const small = (value) => (typeof value === "bigint" && value <= 9007199254740991n ? Number(value) : value);

export function readFrame(data) {
  const frame = msgpack(data);
  needs(Array.isArray(frame) && frame.length >= 8, "frame", "not an array of eight");
  const [version, owner, epoch, series, number, prev, lost, blocks] = frame.map(small);
  needs(version === 1, "frame", "version");
  needs([owner, epoch, series].every(isText) && points(series) >= 1 && points(series) <= 128, "frame", "texts");
  needs(isCount(number) && number >= 1, "frame", "number");
  needs(prev === null || (Array.isArray(prev) && prev.length === 3 && prev.every(isCount)), "frame", "prev");
  needs(Array.isArray(lost) && lost.every((each) => Array.isArray(each) && each.length >= 5), "frame", "lost");
  needs(Array.isArray(blocks), "frame", "blocks");
  const read = blocks.map((block) => {
    needs(Array.isArray(block) && block.length >= 6, "frame", "a block");
    const [codec, count, first, last, rawSize, body] = block.map(small);
    needs((codec === 0 || codec === 1) && isCount(count) && count >= 1 && count <= 4096, "frame", "codec or count");
    needs(isCount(first) && isCount(last) && isCount(rawSize) && rawSize >= 1 && rawSize <= 307200, "frame", "sizes");
    if (body instanceof Uint8Array) return { codec, count, first, last, rawSize, body };
    needs(block.length >= 10, "frame", "neither a body nor a reference");
    const [size, channel, name, key, packed] = block.slice(5).map(small);
    needs(isCount(size) && size >= 17 && size <= 307216, "frame", "size");
    needs(isText(channel) && isChannel(channel), "frame", "channel");
    needs([name, key, packed].every((each) => each instanceof Uint8Array) && name.length === 20 && key.length === 32, "frame", "name or key");
    const seqs = unpackSeqs(first, packed);
    needs(seqs.length === count && seqs.at(-1) === last, "frame", "sequences");
    return { codec, count, first, last, rawSize, ref: { size, channel, name: Buffer.from(name).toString("hex"), key, seqs } };
  });
  needs(read.reduce((sum, block) => sum + block.count, 0) <= 4096, "frame", "too many messages");
  needs(read.filter((block) => block.ref).length <= 32, "frame", "too many references");
  return { owner, epoch, series, number, prev, lost, blocks: read };
}

/** Each sequence but the first is what it adds to the one before, as LEB128. */
function unpackSeqs(first, packed) {
  const seqs = [first];
  let at = BigInt(first), step = 0n, length = 0;
  for (const byte of packed) {
    step |= BigInt(byte & 127) << BigInt(7 * length++);
    if (byte & 128) {
      needs(length < 9, "frame", "a sequence that is too long");
      continue;
    }
    needs(byte !== 0, "frame", "a sequence that does not ascend, or has a longer spelling");
    at += step;
    seqs.push(small(at));
    step = 0n;
    length = 0;
  }
  needs(length === 0, "frame", "sequences that end early");
  return seqs;
}

export function blockShard(name) {
  let hash = 2166136261;
  for (const byte of bytes(name)) hash = Math.imul(hash ^ byte, 16777619) >>> 0;
  return hash % 2147483647;
}

export const blockGet = (space, name) => `$JS.API.DIRECT.GET.BLK_${space}.td.${space}.blk.${blockShard(name)}.${name}.b`;

/** The records of a block that was fetched: those its reference names. */
export function openRef(spaceId, epoch, block, stored) {
  const { size, channel, key, seqs } = block.ref;
  needs(stored.length === size, "block", "another size");
  const bound = pack(["td-blk2", spaceId, epoch, channel, block.first, block.last, block.count, block.codec, block.rawSize]);
  let body;
  try {
    body = sodium.crypto_aead_xchacha20poly1305_ietf_decrypt(null, stored, bound, new Uint8Array(24), key);
  } catch {
    throw new Refused("block", "it does not open");
  }
  const records = openBlock({ ...block, body });
  needs(records.every((record, n) => record.seq === seqs[n]), "block", "other records");
  return records;
}

/** Size in the header of a Zstandard frame (RFC 8878), or null if it does not say; and where its last block ends. */
function measure(body) {
  needs(body.length > 6 && body[0] === 0x28 && body[1] === 0xb5 && body[2] === 0x2f && body[3] === 0xfd, "block", "no Zstandard");
  const descriptor = body[4], single = (descriptor >> 5) & 1;
  let at = 5 + (single ? 0 : 1) + [0, 1, 2, 4][descriptor & 3];
  const width = [single, 2, 4, 8][descriptor >> 6];
  let size = null;
  if (width) {
    size = 0n;
    for (let i = 0; i < width; i++) size |= BigInt(body[at + i] ?? 0) << BigInt(8 * i);
    if (width === 2) size += 256n;
  }
  at += width;
  for (let isLast = false; !isLast;) {
    needs(at + 3 <= body.length, "block", "ends early");
    const header = body[at] | (body[at + 1] << 8) | (body[at + 2] << 16);
    isLast = (header & 1) === 1;
    at += 3 + (((header >> 1) & 3) === 1 ? 1 : header >> 3);
  }
  return { size, end: at + ((descriptor >> 2) & 1 ? 4 : 0) };
}

function unzstd(body, rawSize) {
  const { size, end } = measure(body);
  needs(end === body.length, "block", "ends early, or something follows");
  needs(size === null || size === BigInt(rawSize), "block", "says another size");
  const parts = [];
  let length = 0;
  const stream = new Decompress((part) => {
    length += part.length;
    needs(length <= rawSize, "block", "swells");
    parts.push(Buffer.from(part));
  });
  try {
    stream.push(body, true);
  } catch (error) {
    throw new Refused("block", error.message);
  }
  return Buffer.concat(parts);
}

/** The records of a block: [seq, time in ns, tail, headers, payload]. */
export function openBlock(block) {
  const raw = block.codec === 1 ? unzstd(block.body, block.rawSize) : block.body;
  needs(raw.length === block.rawSize, "block", "another size");
  const records = msgpack(raw);
  needs(Array.isArray(records) && records.length === block.count, "block", "count");
  let before = -1;
  for (const record of records) {
    needs(Array.isArray(record) && record.length >= 5, "block", "a record");
    record[0] = small(record[0]);
    needs(isCount(record[0]) && isCount(record[1]) && isText(record[2]) && record[4] instanceof Uint8Array, "block", "kinds");
    needs(Array.isArray(record[3]) && record[3].every((f) => Array.isArray(f) && f.length === 2 && f.every(isText)), "block", "headers");
    needs(record[0] > before, "block", "order");
    before = record[0];
  }
  needs(records[0][0] === block.first && before === block.last, "block", "range");
  return records.map(([seq, time, tail, headers, payload]) => ({ seq, time: BigInt(time), tail, headers, payload: Buffer.from(payload) }));
}

// --- 9. the steward's word ---

export function openDelta(space, spaceId, stewardKey, subject, fields, payload) {
  if (subject !== `td.${space}.live.roster`) throw new Refused("wrong_subject");
  const signatures = fields.filter(([name]) => name.toLowerCase() === "td-sig");
  if (signatures.length !== 1) throw new Refused("unsigned");
  if (!verifies(signatures[0][1], spaceId, "ruling", stewardKey, "live.roster", payload)) throw new Refused("signature");
  return strictJson(payload);
}

// --- 10. results ---

export function openResult(spaceId, asker, id, answer) {
  const payload = Buffer.from(answer.result, "base64");
  if (!verifies(answer.sig, spaceId, "result", answer.worker, `${asker}.${id}`, payload)) throw new Refused("signature");
  const message = readMessage(payload);
  if (message.from.id !== answer.worker) throw new Refused("sender_mismatch");
  return message;
}

// --- 11. marks ---

export const markOf = (timeNs, subject, payload) =>
  Buffer.from(sodium.crypto_generichash(10, Buffer.concat([bytes(`${timeNs}\n${subject}\n`), payload]), null)).toString("hex");

export const word = (signature) => Buffer.from(sodium.crypto_generichash(16, bytes(signature), null)).toString("hex");

// --- 12. digests ---

const sha256 = (...parts) => parts.reduce((hash, part) => hash.update(part), createHash("sha256")).digest();
const MODULUS = 1n << 256n;

export const itemHash = (sender, id, payload) => sha256(`${sender}\n${id}\n`, sha256(payload));

/** Messages as {channel, sender, id, ts, payload} to a Map of "channel day" to 256 of [count, sum]. */
export function digestsOf(messages) {
  const days = new Map();
  for (const { channel, sender, id, ts, payload } of messages) {
    const key = `${channel} ${ts.slice(0, 10)}`, item = itemHash(sender, id, Buffer.from(payload));
    if (!days.has(key)) days.set(key, Array.from({ length: 256 }, () => [0, 0n]));
    const bucket = days.get(key)[item[0]];
    bucket[0] += 1;
    bucket[1] = (bucket[1] + BigInt(`0x${item.toString("hex")}`)) % MODULUS;
  }
  return days;
}

export const spelled = ([count, sum]) => [count, sum.toString(16).padStart(64, "0")];

export const totalOf = (buckets) => buckets.reduce(([n, all], [count, sum]) => [n + count, (all + sum) % MODULUS], [0, 0n]);

export function dayHash(buckets) {
  const lines = buckets.map(([count, sum]) => BigInt(count).toString(16).padStart(16, "0") + spelled([count, sum])[1]);
  return sha256(Buffer.from(lines.join(""), "hex")).toString("hex");
}

export const channelHash = (days) => sha256(days.map(([day, buckets]) => `${day}\n${dayHash(buckets)}\n`).join("")).toString("hex");

// node vectors.mjs VECTORS: every golden vector, as the functions of wire.mjs have it. One line for each that differs.
import { readFileSync } from "node:fs";
import * as wire from "./wire.mjs";

const golden = JSON.parse(readFileSync(process.argv[2], "utf8"));
const space = golden.subjects.space, spaceId = golden.keys.space.id, steward = golden.keys.steward.id;
const bob = { id: golden.keys.bob.id, ...wire.keyPair(golden.keys.bob.seed) };
const ada = { id: golden.keys.ada.id, ...wire.keyPair(golden.keys.ada.seed) };
let checked = 0, wrong = 0;

function same(what, found, expected) {
  checked++;
  if (JSON.stringify(found) !== JSON.stringify(expected)) {
    wrong++;
    console.log(`${what}: found ${JSON.stringify(found)}, expected ${JSON.stringify(expected)}`);
  }
}

/** What an act came to: null if it went well, otherwise why it was refused. */
function reason(act) {
  try {
    act();
    return null;
  } catch (error) {
    if (!(error instanceof wire.Refused)) throw error;
    return error.reason;
  }
}

const rules = { token: wire.isToken, channel: wire.isChannel, pattern: wire.isPattern, agent_id: wire.isAgentId, message_id: wire.isMessageId };
for (const [kind, { valid, invalid }] of Object.entries(golden.names)) {
  for (const name of valid) same(`${kind} ${name}`, rules[kind](name), true);
  for (const name of invalid) same(`${kind} ${JSON.stringify(name)}`, rules[kind](name), false);
}
for (const each of golden.covers) same(`${each.wide} covers ${each.narrow}`, wire.covers(each.wide, each.narrow), each.covers);
for (const each of golden.shards) same(`shard of ${each.owner}`, wire.shardOf(each.owner), each.shard);
const foreign = ["Audit", "Dead"]; // of streams that an agent never sees
for (const each of golden.subjects.valid) if (!foreign.includes(each.type)) same(each.subject, wire.parseSubject(space, each.subject) !== null, true);
for (const each of golden.subjects.invalid) if (!each.includes(".ctl.")) same(each, wire.parseSubject(space, each), null);
for (const each of golden.signatures) {
  const payload = Buffer.from(each.payload);
  same(`signed ${each.kind}`, wire.signedBytes(each.space_id, each.kind, each.sender, each.destination, payload).toString("hex"), each.signed_bytes_hex);
  same(`signature ${each.kind}`, wire.sign(ada, each.space_id, each.kind, each.destination, payload), each.signature);
  same(`verifies ${each.kind}`, wire.verifies(each.signature, each.space_id, each.kind, each.sender, each.destination, payload), true);
}
for (const each of golden.bad_signatures) {
  same(`signature: ${each.why}`, wire.verifies(each.signature, each.space_id, each.kind, each.sender, each.destination, Buffer.from(each.payload)), false);
}
for (const each of golden.sealed) {
  const opened = wire.openSealed(bob, each.sender, wire.readMessage(Buffer.from(each.sealed)));
  const said = JSON.parse(each.message);
  same("sealed", [opened.parts, opened.reply_to, opened.context], [said.parts, said.reply_to, said.context]);
  const again = wire.seal(ada, bob.id, said, Buffer.from(each.nonce_hex, "hex"));
  same("sealed again", wire.openSealed(bob, ada.id, again).parts, said.parts);
}
for (const each of golden.bad_seals) {
  const found = reason(() => wire.openSealed(bob, each.sender, wire.readMessage(Buffer.from(each.sealed))));
  same(`seal: ${each.why}`, found, each.seen_by === "seal" ? "seal" : "malformed");
}
for (const each of golden.messages.valid) same(`message: ${each.why}`, wire.textOf(wire.readMessage(Buffer.from(each.payload))), each.text);
for (const each of golden.messages.invalid) same(`message: ${each.why}`, reason(() => wire.readMessage(Buffer.from(each.payload))), "malformed");
for (const each of golden.records) {
  const payload = Buffer.from(each.payload + " ".repeat(each.blanks ?? 0));
  same(`record: ${each.why}`, reason(() => wire.openRecord(space, spaceId, each.subject, wire.readBlock(Buffer.from(each.block)), payload)), each.refused);
}
for (const each of golden.linked) {
  const admits = wire.admits(golden.links, each.seq, BigInt(each.time_ns)), payload = Buffer.from(each.payload);
  const open = (by) => () => wire.openRecord(space, spaceId, each.subject, wire.readBlock(Buffer.from(each.block)), payload, by);
  same(`linked: ${each.why}`, reason(open(admits)), each.refused);
  same(`linked, no links known: ${each.why}`, reason(open(undefined)), "wrong_kind");
}
for (const each of golden.headers) {
  if (each.malformed) { same(`block: ${each.why}`, reason(() => wire.readBlock(Buffer.from(each.block))), "header"); continue; }
  if (each.policy !== "republish") continue; // an agent meets no other
  const { own } = wire.cutTail(wire.readBlock(Buffer.from(each.block)));
  same(`block: ${each.why}`, own, each.own);
  same(`reserved: ${each.why}`, own.map(([name]) => name).filter(wire.isReserved), each.refused);
}
for (const each of golden.frames.valid) {
  const frame = wire.readFrame(Buffer.from(each.frame_hex, "hex"));
  same(`frame: ${each.why}`, [frame.owner, frame.epoch, frame.series, frame.number, frame.prev, frame.lost], [each.owner, each.epoch, each.series, each.number, each.prev, each.lost]);
  for (const [n, block] of frame.blocks.entries()) {
    const { ref } = each.blocks[n];
    if (ref) {
      same(`reference: ${each.why}`, [block.ref.size, block.ref.channel, block.ref.name, block.ref.seqs], [ref.size, ref.channel, ref.name, ref.seqs]);
      same(`get: ${each.why}`, wire.blockGet(space, block.ref.name), ref.get);
    }
    const opened = ref ? wire.openRef(spaceId, frame.epoch, block, Buffer.from(ref.stored_hex, "hex")) : wire.openBlock(block);
    const records = opened.map((r) => ({ seq: r.seq, subject_tail: r.tail, headers: r.headers, payload: r.payload.toString() }));
    same(`records: ${each.why}`, records, each.blocks[n].records.map(({ time, ...rest }) => rest));
    for (const r of opened) same("a record of a frame", reason(() => wire.openRecord(space, spaceId, `td.${space}.${r.tail}`, r.headers, r.payload)), null);
  }
}
for (const each of golden.frames.invalid) {
  const found = reason(() => {
    const frame = wire.readFrame(Buffer.from(each.frame_hex, "hex"));
    try {
      frame.blocks.forEach((block) => block.ref ? wire.openRef(spaceId, frame.epoch, block, Buffer.from(each.stored_hex, "hex")) : wire.openBlock(block));
    } catch (error) {
      throw error instanceof wire.Refused ? new wire.Refused("block", error.message) : error;
    }
  });
  same(`frame: ${each.why}`, found, each.refused);
}
for (const each of golden.block_shards) same("block shard", wire.blockShard(each.name), each.shard);
for (const each of golden.deltas) {
  const fields = each.signature ? [["Td-Sig", each.signature]] : [];
  same(`delta: ${each.why}`, reason(() => wire.openDelta(space, spaceId, steward, each.subject, fields, Buffer.from(each.payload))), each.refused);
}
for (const each of golden.rulings) {
  const tail = each.subject.slice(`td.${space}.`.length);
  same(`ruling: ${each.why}`, wire.verifies(each.signature, spaceId, "ruling", steward, tail, Buffer.from(each.payload)), each.refused !== "signature");
}
for (const each of golden.results) same(`result: ${each.why}`, reason(() => wire.openResult(spaceId, each.asker, each.id, each)), each.refused);
for (const each of golden.marks) same("mark", wire.markOf(BigInt(each.time_ns), each.subject, Buffer.from(each.payload)), each.mark);
for (const each of golden.digests.items) {
  const item = wire.itemHash(each.sender, each.id, Buffer.from(each.payload));
  same("item of a digest", [item.toString("hex"), item[0]], [each.item_hex, each.bucket]);
}
for (const each of golden.digests.sets) {
  const found = wire.digestsOf(each.messages.map((number) => golden.digests.items[number]));
  for (const [channel, { hash, days }] of Object.entries(each.channels)) {
    const named = Object.keys(days).map((day) => [day, found.get(`${channel} ${day}`)]);
    same(`${each.why}: ${channel}`, wire.channelHash(named), hash);
    for (const [day, buckets] of named) {
      const filled = Object.fromEntries(buckets.map((bucket, at) => [at, wire.spelled(bucket)]).filter(([, [count]]) => count));
      same(`${each.why}: ${channel} ${day}`, { digest: wire.spelled(wire.totalOf(buckets)), hash: wire.dayHash(buckets), buckets: filled }, days[day]);
    }
  }
}
console.log(`${checked} checked, ${wrong} differ`);
process.exitCode = wrong ? 1 : 0;

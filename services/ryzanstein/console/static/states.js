// What states of an answer are called.

export const OVER = new Set(["complete", "length", "stopped", "failed", "lost"]);

/** @type {Record<string, string>} */
export const SAID = {
  waiting: "waiting for a node", streaming: "answering", stopping: "stopping", complete: "", length: "ended at the most tokens",
  stopped: "stopped", failed: "failed", lost: "not complete",
};

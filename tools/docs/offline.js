// A browser starts no worker from a page on the disk, and the search is one: there its script runs in a hidden frame.
if (location.protocol === "file:")
  window.Worker = class {
    constructor(url) {
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      this.frame = frame
      this.inner = frame.contentWindow
      this.inner.postMessage = (data) => setTimeout(() => this.onmessage?.({ data }))
      const script = frame.contentDocument.createElement("script")
      script.src = url
      script.onload = () => {
        this.ready = true
        this.waiting.forEach((data) => this.postMessage(data))
      }
      frame.contentDocument.documentElement.append(script)
    }
    postMessage(data) {
      if (this.ready) this.inner.onmessage({ data })
      else this.waiting.push(data)
    }
    terminate() {
      this.frame.remove()
    }
  }

"""What a request asks of its tokens: penalties, seeds, verification of drafts by sampling."""
